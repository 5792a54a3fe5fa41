"""A streamed reply, joined from events that repeat all tokens or hold the new ones alone, and streams that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollart.engines.client import EVENT_BYTES, EngineClient
from rollart.engines.errors import EngineRefused
from rollart.engines.stream import StreamedReply
from rollart.types import GenerateRequest, SamplingTransform, Version

IDS = [4, 5, 6, 7, 8, 9]


def event(start: int, end: int, finish: str | None = None, version: str = "0-1", **meta: Any) -> dict[str, Any]:
    """What an engine tells of the tokens [start, end), of `end` so far."""
    told = {
        "id": "r", "finish_reason": finish and {"type": finish}, "prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": end,
        "weight_version": version, "output_token_logprobs": [[-float(i), i, None] for i in IDS[start:end]],
    }  # fmt: skip
    return {"output_ids": IDS[start:end], "meta_info": {**told, **meta}}


SPANS = [{"version": "0-1", "start": 0, "end": 3}, {"version": "0-2", "start": 3, "end": 6}]


@pytest.mark.parametrize("starts", [(0, 0, 0), (0, 1, 4)], ids=["repeated", "incremental"])
def test_the_events_of_either_kind_are_one_response(starts: Sequence[int]) -> None:
    reply = StreamedReply()
    told = [reply.take(event(start, end)) for start, end in zip(starts, (1, 4), strict=False)]
    assert [(t.ids, t.logprobs, t.finish_reason) for t in told] == [
        ((4,), (-4.0,), "abort"), ((4, 5, 6, 7), (-4.0, -5.0, -6.0, -7.0), "abort"),
    ]  # fmt: skip
    whole = reply.take(event(starts[2], 6, "length", "0-2", weight_versions=SPANS, e2e_latency=3.0, queue_time=1.0, decode_throughput=5.0))
    assert (whole.ids, whole.logprobs) == (tuple(IDS), tuple(-float(i) for i in IDS))
    assert [v.step for v in whole.versions] == [1, 1, 1, 2, 2, 2], "the last event's spans say it of all tokens"
    assert (whole.finish_reason, whole.prompt_tokens, whole.cached_tokens) == ("length", 3, 2)
    assert whole.service is not None and whole.service.decode == 1.0, "five intervals at five a second"


def test_until_the_end_a_token_is_of_the_version_that_was_served_when_it_came() -> None:
    reply = StreamedReply()
    reply.take(event(0, 2, version="0-1"))
    assert [v.step for v in reply.take(event(2, 5, version="0-2")).versions] == [1, 1, 2, 2, 2]


def test_spans_in_the_middle_of_a_response_count_from_its_beginning() -> None:
    reply = StreamedReply()
    reply.take(event(0, 2, weight_versions=[{"version": "0-1", "start": 0, "end": 2}]))
    part = reply.take(event(2, 5, weight_versions=[SPANS[0], {"version": "0-2", "start": 3, "end": 5}]))
    assert [v.step for v in part.versions] == [1, 1, 1, 2, 2]


def test_the_abort_of_a_queued_request_repeats_its_last_token_and_all_log_probabilities() -> None:
    reply = StreamedReply()
    before = reply.take(event(0, 4))
    aborted = {"id": "r", "finish_reason": {"type": "abort"}, "completion_tokens": 4, "weight_version": "0-1"}
    aborted["output_token_logprobs"] = event(0, 4)["meta_info"]["output_token_logprobs"]
    last = reply.take({"output_ids": [7], "meta_info": aborted})
    assert (last.ids, last.logprobs, last.finish_reason) == (before.ids, before.logprobs, "abort")
    assert (last.prompt_tokens, last.cached_tokens) == (3, 2)


def test_tokens_that_no_event_had_and_log_probabilities_that_are_missing_are_errors() -> None:
    reply = StreamedReply()
    reply.take(event(0, 2))
    with pytest.raises(ValueError, match="an event has 1 tokens up to number 4, after 2 were known"):
        reply.take(event(3, 4))
    with pytest.raises(ValueError, match="sent 2 ids with 1 log-probabilities"):
        reply.take(event(2, 4, output_token_logprobs=[[-6.0, 6, None]]))
    with pytest.raises(ValueError, match="an event has 1 tokens up to number 1, after 2"):
        reply.take(event(0, 1))


@pytest.fixture
def answering() -> Callable[[bytes, str], Any]:
    """A server that answers every request with that body of that type; an async context manager of its URL."""

    @asynccontextmanager
    async def serve(body: bytes, kind: str) -> AsyncIterator[str]:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=body, content_type=kind)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    return serve


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"data: " + b" " * (2 * EVENT_BYTES) + b"{}\n\n", f"a line of its reply to /generate has more than {2 * EVENT_BYTES} bytes"),
        (b"data: {nothing}\n\n", "an event of its reply to /generate is no JSON"),
        (b'data: {"output_ids": [4]}\n\n', "its reply to /generate cannot be used: 'meta_info'"),
    ],
    ids=["too long", "no JSON", "another form"],
)
async def test_a_stream_that_cannot_be_read_is_refused_with_the_reason(answering: Any, body: bytes, said: str) -> None:
    async with answering(body, "text/event-stream") as url, EngineClient() as client:
        with pytest.raises(EngineRefused, match=said):
            await client.generate(url, GenerateRequest("r", (5,), 4), lambda _: None)


async def test_a_control_reply_that_is_no_json_is_refused(answering: Any) -> None:
    async with answering(b"{nothing", "application/json") as url, EngineClient() as client:
        with pytest.raises(EngineRefused, match="its reply to /v1/loads is no JSON"):
            await client.load(url)


async def test_events_of_the_embedded_engine_hold_the_new_tokens_alone_where_that_is_asked_for(served: Any, wire: Any, tiny: Any) -> None:
    more = {"incremental": True, "sampling": {"temperature": 1.0, "sampling_seed": 3}}
    events = [e async for e in wire.events(tiny.prompt(6), 60, **more)]
    counts = [len(e["output_ids"]) for e in events]
    assert sum(counts) == 60 and len(counts) > 5
    assert [e["meta_info"]["completion_tokens"] for e in events] == [sum(counts[: n + 1]) for n in range(len(counts))]
    assert [i for e in events for _, i, _ in e["meta_info"]["output_token_logprobs"]] == [i for e in events for i in e["output_ids"]]
    request = GenerateRequest("same", tuple(tiny.prompt(6)), 60, SamplingTransform(temperature=1.0), seed=3)
    async with EngineClient() as client:
        heard = asyncio.Event()
        streamed = await client.generate(served.url, request, lambda _: heard.set())
    assert heard.is_set() and set(streamed.versions) == {Version(0, 0)}
    assert list(streamed.ids) == [i for e in events for i in e["output_ids"]][: len(streamed.ids)]
