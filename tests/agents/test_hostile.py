"""An agent is not trusted: it gets nowhere but to its own attempt, and what it sends costs a bounded amount."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from rollart.agents.answering import Budget
from rollart.agents.rendering import Rendering
from rollart.agents.server import Bounds
from rollart.types import GenerateRequest, GenerateResult
from tests.agents.serving import Says, Served, serve, spoken

ROOM = Budget(64, 12, 100_000)


async def post(served: Served, data: Any, path: str = "/chat/completions", **headers: str) -> tuple[int, Any]:
    """Status and JSON of a raw request with the attempt's key."""
    headers = {"Authorization": f"Bearer {served.door.key}", "Content-Type": "application/json", **headers}
    async with aiohttp.ClientSession() as session, session.post(served.door.url + path, data=data, headers=headers) as answer:
        return answer.status, json.loads(await answer.text())


def body(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"messages": [spoken(m) for m in messages], **more}).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no JSON"), (b"{", "no JSON"), (b"[]", "no JSON object"), (b"[" * 100_000, "no JSON"), (b'{"messages": ' + b"[" * 50_000, "no JSON"),
        (b"\xff\xfe", "no JSON"), (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "no JSON"), (b'{"a": NaN}', "no JSON"),
        (b"{}", "messages: Field required"), (body(), "no messages"),
        (body({"role": "root", "content": "x"}), r"messages.0.role"),
        (body({"role": "user", "content": 5}), "messages.0.content"),
        (body({"role": "user", "content": [{"type": "image_url"}]}), "messages.0.content"),
        (body("a", max_tokens=0), "max_tokens"), (body("a", stop=[""]), "stop"), (body("a", stop=list("abcde")), "5 stop"),
        (body("a", tools=[{"type": "function", "function": {"name": ""}}]), "tools.0.function.name"),
        (body("a", tools=[{"type": "web"}]), "tools.0.type"),
        (body("a", tools=[{"type": "function", "function": {"name": "f"}}] * 129), "129 tools"), (body(*["a"] * 4097), "4097 messages"),
        (body("a", max_tokens=10**30), ""),
    ],
)  # fmt: skip
async def test_a_request_that_makes_no_sense_is_a_400_that_says_why(rendering: Rendering, data: bytes, says: str) -> None:
    async with serve(rendering, Says(rendering, "1"), ROOM) as served:
        status, answer = await post(served, data)
        if not says:  # a large number of tokens is merely more than there are
            assert status == 200
            return
        error = answer["error"]
        assert status == 400 and error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}
        assert says in error["message"] or says in str(error["param"])
        assert served.segments == []


async def test_a_body_that_is_too_large_or_packed_is_refused_before_it_is_held(rendering: Rendering) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65_536
            yield b" " * 65_536

    async with serve(rendering, Says(rendering, "1"), ROOM, Bounds(body=100_000)) as served:
        status, answer = await post(served, b" " * 100_001)
        assert status == 413 and answer["error"]["code"] == "request_too_large"
        try:
            status, _ = await post(served, endless())
            assert status == 413
        except aiohttp.ClientError:
            pass  # the server has closed the connection: as well
        assert sent < 64 << 20
        status, _ = await post(served, gzip.compress(b" " * (50 << 20)), **{"Content-Encoding": "gzip"})
        assert status == 415
        assert (await post(served, body("a")))[0] == 200


async def test_a_thousand_messages_are_rendered_and_gone_on_from(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, "1", "2"), ROOM) as served:
        turns = [m for n in range(500) for m in (f"say {n}", {"role": "assistant", "content": str(n)})]
        first = await served.ask(*turns, "and?")
        await served.ask(*turns, "and?", first.choices[0].message, "so?")
        assert [len(s.turns) for s in served.segments] == [2]


async def test_a_key_opens_its_own_attempt_alone_and_no_path_leads_elsewhere(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, "1")) as one, serve(rendering, Says(rendering, "2")) as other:
        with one.server.serve(other.answering, Bounds()) as second:  # on the same server
            async with openai.AsyncOpenAI(base_url=second.url, api_key=one.door.key, max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            for path in ("/../../x/v1/models", "/%2e%2e/v1/models", "//models", "/models/..", "/models/", "/engines", "/", "/..%2f..%2fetc%2fpasswd"):
                assert (await post(one, body("a"), path))[0] in (404, 405), path
        token = one.door.url.split("/")[-2]
        for wrong in (token[:-1], token + "x", "", "*", token.upper()):
            async with openai.AsyncOpenAI(base_url=one.door.url.replace(token, wrong), api_key=one.door.key, max_retries=0) as client:
                with pytest.raises(openai.NotFoundError):
                    await client.models.list()
        assert one.segments == other.segments == []


async def test_the_url_ends_with_the_attempt_and_so_does_what_is_in_flight(rendering: Rendering) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def generate(request: GenerateRequest) -> GenerateResult:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with serve(rendering, generate) as served:
        with served.server.serve(served.answering, Bounds()) as door:
            client = openai.AsyncOpenAI(base_url=door.url, api_key=door.key, max_retries=0)
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=[spoken("a")]))
            await asked.wait()
        with pytest.raises(openai.NotFoundError, match="the attempt has ended"):
            await asking
        assert ended.is_set() and served.segments == []
        with pytest.raises(openai.NotFoundError):
            await client.models.list()
        await client.close()


async def test_requests_in_flight_are_bounded(rendering: Rendering) -> None:
    says, free, two = Says(rendering, "1", "2"), asyncio.Event(), asyncio.Semaphore(0)

    async def generate(request: GenerateRequest) -> GenerateResult:
        two.release()
        await free.wait()
        return await says(request)

    async with serve(rendering, generate, bounds=Bounds(requests=2)) as served:
        asking = [asyncio.create_task(served.ask(text)) for text in "ab"]
        await two.acquire()
        await two.acquire()
        with pytest.raises(openai.RateLimitError):
            await served.ask("c")
        free.set()
        await asyncio.gather(*asking)
        assert len(served.segments) == 2


async def test_a_request_that_never_comes_whole_holds_no_other_up(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, "1")) as served:
        address = urlsplit(served.door.url)
        assert address.hostname is not None
        with socket.create_connection((address.hostname, address.port or 0)) as slow:
            slow.sendall(f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.door.key}\r\n".encode())
            slow.sendall(b"Content-Length: 1000\r\n\r\n{")
            await served.ask("a")
        assert len(served.segments) == 1
