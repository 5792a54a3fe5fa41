"""The HTTP server that agents' OpenAI clients speak to, one a worker; owns the paths and keys of attempts, answers nothing by itself.

An agent is not trusted: it gets to its own attempt alone, may send bodies of a bounded size, and have a bounded number of requests in flight.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from distributed.utils import get_ip
from pydantic import BaseModel, ValidationError

from rollart.agents import chat, responses
from rollart.agents.answering import Answering
from rollart.agents.errors import ApiError, bad_request
from rollart.agents.parameters import OtherParameters, look_at

__all__ = ["AgentServer", "Bounds", "Door"]

BODY_S = 60.0
"""How long a request's body may take to come."""

ANY = ("0.0.0.0", "::", "")

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an agent may send: `requests` in flight at once, bytes of a `body`, and what becomes of parameters that are not its business."""

    requests: int = 8
    body: int = 1 << 20
    others: OtherParameters = "ignore"


@dataclass(slots=True)
class Door:
    """An attempt that is served. `url` and `key` are its client's `base_url` and `api_key`."""

    answering: Answering
    bounds: Bounds
    url: str
    key: str
    stored: responses.Stored = field(default_factory=responses.Stored)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    in_flight: int = 0


class AgentServer:
    """Serves attempts at `http://HOST:PORT/attempts/TOKEN/v1`, each for as long as its `serve` lasts; port 0 takes any that is free."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        self._doors: dict[str, Door] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self.address = ""

    async def start(self) -> None:
        """Listens, if it doesn't yet."""
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=0)
            app.router.add_route("*", "/{path:.*}", self._answered)
            # A client that goes away ends its request; what is packed is not unpacked before anybody has looked at its size.
            runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            try:
                site = web.TCPSite(runner, self._host, self._port)
                await site.start()
            except OSError:
                await runner.cleanup()
                raise
            port = runner.addresses[0][1]
            host = get_ip() if self._host in ANY else self._host
            self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._runner = runner

    async def close(self) -> None:
        """Ends every attempt's requests, and listens no more."""
        for door in self._doors.values():
            door.closed.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def serve(self, answering: Answering, bounds: Bounds) -> Iterator[Door]:
        """The attempt's door, open until the context ends; what is in flight then ends with 404, as does whatever comes later."""
        token = secrets.token_urlsafe(32)
        door = Door(answering, bounds, f"{self.address}/attempts/{token}/v1", f"sk-{secrets.token_urlsafe(32)}")
        self._doors[token] = door
        try:
            yield door
        finally:
            del self._doors[token]
            door.closed.set()

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        try:
            door, route = self._let_in(request)
            if door.in_flight >= door.bounds.requests:
                raise ApiError(
                    429, f"{door.bounds.requests} requests of this attempt are in flight, which is all it may have", code="rate_limit_exceeded"
                )
            door.in_flight += 1
            try:
                return await route(door, request)
            finally:
                door.in_flight -= 1
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        except ConnectionError:
            raise
        except Exception:
            log.exception("a request of an agent failed")
            return web.json_response(ApiError(500, "the server failed; its log says how").body, status=500)

    def _let_in(self, request: web.Request) -> tuple[Door, Callable[[Door, web.Request], Awaitable[web.StreamResponse]]]:
        parts = request.raw_path.partition("?")[0].split("/")
        door = self._doors.get(parts[2]) if len(parts) > 2 and parts[:2] == ["", "attempts"] else None
        if door is None:
            raise ApiError(404, "there is no such attempt, or it has ended", code="attempt_ended")
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {door.key}".encode()):
            raise ApiError(401, "the API key is not that of this attempt", code="invalid_api_key")
        routes = {"v1/chat/completions": ("POST", _chat), "v1/responses": ("POST", _responses), "v1/models": ("GET", _models)}
        path = "/".join(parts[3:])
        if path not in routes:
            raise ApiError(404, "unknown path; there are chat/completions, responses and models", code="unknown_url")
        method, route = routes[path]
        if request.method != method:
            raise ApiError(405, f"{path} takes {method}", code="method_not_allowed")
        return door, route


async def _models(door: Door, request: web.Request) -> web.StreamResponse:
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rollart"}
    return web.json_response({"object": "list", "data": [model]})


async def _chat(door: Door, request: web.Request) -> web.StreamResponse:
    asked = await _read(door, request, chat.ChatRequest)
    answer = await _unless_closed(door, door.answering.answer(asked.ask))
    created = int(time.time())
    if not asked.stream:
        return web.json_response(chat.completion(answer, asked, created))
    return await _stream(request, ((None, chunk) for chunk in chat.chunks(answer, asked, created)), done=True)


async def _responses(door: Door, request: web.Request) -> web.StreamResponse:
    asked = await _read(door, request, responses.ResponsesRequest)
    before = door.stored.before(asked)
    answer = await _unless_closed(door, door.answering.answer(asked.ask(before)))
    door.stored.keep(asked, before, answer)
    created = int(time.time())
    if not asked.stream:
        return web.json_response(responses.response(answer, asked, created))
    return await _stream(request, ((event["type"], event) for event in responses.events(answer, asked, created)), done=False)


Result = TypeVar("Result")


async def _unless_closed(door: Door, work: Awaitable[Result]) -> Result:
    """The result of `work`, which ends with the attempt."""
    doing, closing = asyncio.ensure_future(work), asyncio.ensure_future(door.closed.wait())
    try:
        await asyncio.wait((doing, closing), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ApiError(404, "the attempt has ended", code="attempt_ended")
    finally:
        doing.cancel()
        closing.cancel()
        await asyncio.gather(doing, closing, return_exceptions=True)


async def _read(door: Door, request: web.Request, model: type[Request]) -> Request:
    """The request's body, with the parameters that are not the agent's business taken care of. ApiError."""
    body = _parsed(await _bytes(request, door.bounds.body))
    answering = door.answering
    look_at(body, model.model_fields.keys() - {"tool_choice"}, answering.transform, door.bounds.others, lambda name: answering.count_ignored(name))
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise bad_request(f"{where}: {first['msg']}", where) from error


async def _bytes(request: web.Request, limit: int) -> bytes:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(415, "a packed body is not read; send it as it is", code="unsupported_encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > limit:
                    raise ApiError(413, f"the body is over the {limit} bytes that a request may have", code="request_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:g} s", code="request_timeout") from None
    return bytes(body)


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False).encode()  # what can't be written can't be rendered
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise bad_request("the body is no JSON object", code="invalid_json")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


async def _stream(request: web.Request, events: Iterable[tuple[str | None, dict[str, Any]]], done: bool) -> web.StreamResponse:
    """Server-sent events. The whole answer was sampled and recorded before the first of them, so that every error has its HTTP status."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for name, event in events:
        line = f"data: {json.dumps(event)}\n\n"
        await stream.write((line if name is None else f"event: {name}\n{line}").encode())
    if done:
        await stream.write(b"data: [DONE]\n\n")
    await stream.write_eof()
    return stream
