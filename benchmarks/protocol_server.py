"""`python -m benchmarks.protocol_server WAY`: what `benchmarks.protocol` talks to, a process of its own; prints {"url"} once it listens.

`engine` is the embedded engine's server over a scheduler that computes nothing; `floor` answers with ready-made bytes of the same length, which
is what aiohttp alone takes for such requests.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from rollart.engines.embedded import wire
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.scheduler import Scheduler
from rollart.engines.embedded.server import EngineServer
from rollart.engines.response import STREAM_INTERVAL
from rollart.types import SamplingTransform

VOCABULARY = 50_000
LONGEST = 65_536
VERSION = "0-1"
_DRAWN = random.Random(0)
IDS = [_DRAWN.randrange(VOCABULARY) for _ in range(LONGEST)]
LOGPROBS = [-_DRAWN.expovariate(1.0) for _ in range(LONGEST)]


class NoModel:
    """What the server asks of a model."""

    loaded, vocabulary, eos_token_ids = True, VOCABULARY, frozenset[int]()


class NoScheduler:
    """What the server asks of a scheduler to generate: a step ends a response, or adds an interval to one that is streamed."""

    version, speculator = VERSION, None

    def __init__(self, report: Callable[[list[Request]], None]) -> None:
        self._report, self._requests = report, list[Request]()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def abort(self, matches: Callable[[Request], bool], message: str = "aborted") -> int:
        self._requests = [r for r in self._requests if not matches(r)]
        return 0

    def step(self) -> None:
        now, requests = time.perf_counter(), self._requests
        for request in requests:
            advance(request, now)
        self._requests = [r for r in requests if r.finish is None]
        self._report(requests)


def advance(request: Request, now: float) -> None:
    """The tokens of one step, as the scheduler's thread writes them."""
    before = len(request.output_ids)
    after = min(before + STREAM_INTERVAL, request.max_new_tokens) if request.streaming else request.max_new_tokens
    request.output_ids += IDS[before:after]
    request.logprobs += LOGPROBS[before:after]
    request.entered, request.began, request.ended = request.entered or now, request.began or now, now
    if after == request.max_new_tokens:
        request.finish = {"type": "length", "length": after}
    request.spans[:] = [(VERSION, 0, after)]


def engine() -> web.Application:
    server = EngineServer(cast(PolicyModel, NoModel()), lambda report: cast(Scheduler, NoScheduler(report)), LONGEST, {"deterministic": False})
    server.engine.start()
    return server.application()


def floor() -> web.Application:
    """Reads each body, and answers with what the engine would, made once for each length."""
    made: dict[tuple[int, bool], list[bytes]] = {}

    def ready(tokens: int, stream: bool) -> list[bytes]:
        request = Request("r" * 16, (0,), tokens, SamplingTransform(), 0, frozenset(), streaming=stream)
        pieces = []
        while request.finish is None:
            sent = len(request.output_ids)
            advance(request, time.perf_counter())
            body = wire.reply(request, VERSION, True, None if request.finish else len(request.output_ids), sent if stream else 0)
            pieces.append(f"data: {json.dumps(body)}\n\n".encode() if stream else json.dumps(body).encode())
        return [*pieces, b"data: [DONE]\n\n"] if stream else pieces

    async def answer(http: web.Request) -> web.StreamResponse:
        await http.read()
        kind = int(http.query["tokens"]), "stream" in http.query
        if kind not in made:
            made[kind] = ready(*kind)
        pieces = made[kind]
        if not kind[1]:
            return web.Response(body=pieces[0], content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)  # the engine's increments come one by one too
        await response.write_eof()
        return response

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", answer)
    return app


async def cpu(http: web.Request) -> web.Response:
    return web.json_response({"seconds": time.process_time()})


async def serve(way: str) -> None:
    app = {"engine": engine, "floor": floor}[way]()
    app.router.add_get("/cpu", cpu)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    told: dict[str, Any] = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    print(json.dumps(told), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # its owner's end is its own
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
