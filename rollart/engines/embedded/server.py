"""SGLang's HTTP calls over the engine's loop; owns the routes and who waits for which request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from rollart.engines.embedded import wire
from rollart.engines.embedded.loop import EngineLoop
from rollart.engines.embedded.model import PolicyModel, WeightsError
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.scheduler import Scheduler
from rollart.engines.speculative.speculator import Speculator

__all__ = ["EngineServer"]

log = logging.getLogger(__name__)

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

_BODY_BYTES = 64 * 2**20


class _Waiter:
    """One open generate call: woken after each step that concerns its request."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()


class EngineServer:
    """The HTTP face of one engine. Build it inside the event loop that serves it; `info` is what `/server_info` tells."""

    def __init__(
        self, model: PolicyModel, make: Callable[[Callable[[list[Request]], None]], Scheduler], max_length: int, info: dict[str, Any]
    ) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._scheduler = make(self._report)
        self._max_length = max_length
        self._info = info
        self._updating = asyncio.Lock()
        self.crashed: asyncio.Future[BaseException] = self._loop.create_future()
        self.engine = EngineLoop(self._scheduler, self._crash)

    def application(self) -> web.Application:
        """The routes. A path that SGLang answers to GET and POST alike does so here."""
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        for path, handler in (
            ("/health", self._health), ("/health_generate", self._health_generate), ("/model_info", self._model_info),
            ("/server_info", self._server_info), ("/v1/loads", self._loads), ("/flush_cache", self._flush), ("/metrics", self._metrics),
        ):  # fmt: skip
            app.router.add_get(path, handler)
            app.router.add_post(path, handler)
        return app

    def _report(self, requests: list[Request]) -> None:
        """Called by the loop's thread: wakes whom it concerns, all at once."""
        waiters = [r.sink for r in requests]
        self._loop.call_soon_threadsafe(_wake, waiters)

    def _crash(self, error: BaseException) -> None:
        log.error("the engine's loop failed", exc_info=error)

        def tell() -> None:
            if not self.crashed.done():
                self.crashed.set_result(error)

        self._loop.call_soon_threadsafe(tell)

    async def _call(self, action: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.engine.call(action))

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await _read(http, wire.GenerateBody)
        if not self._model.loaded:
            raise web.HTTPServiceUnavailable(text="no weights yet: call /update_weights_from_disk first")
        deterministic = bool(self._info["deterministic"])
        request = body.to_request(self._model.vocabulary, self._max_length, self._model.eos_token_ids, deterministic)
        waiter = request.sink = _Waiter()
        self.engine.post(lambda: self._scheduler.add(request))
        try:
            if body.stream:
                return await self._stream(http, request, waiter, body)
            while request.finish is None:
                waiter.changed.clear()
                await waiter.changed.wait()
        finally:
            if request.finish is None:  # the caller went away: nobody will read the rest
                self.engine.post(lambda: _ignore(self._scheduler.abort(lambda r: r is request)))
        return web.json_response(wire.reply(request, self._scheduler.version, body.return_logprob))

    async def _stream(self, http: web.Request, request: Request, waiter: _Waiter, body: wire.GenerateBody) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        sent = 0
        while True:
            waiter.changed.clear()
            ended = request.finish is not None
            # The loop's thread writes spans last of the three, so this many tokens are whole.
            n = request.spans[-1][2] if request.spans else 0
            if ended or n > sent:
                since = sent if body.incremental else 0
                piece = json.dumps(wire.reply(request, self._scheduler.version, body.return_logprob, None if ended else n, since))
                await response.write(f"data: {piece}\n\n".encode())
                sent = n
            if ended:
                break
            await waiter.changed.wait()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _read(http, wire.AbortBody)
        if body.abort_all or body.rid:
            await self._call(lambda: self._scheduler.abort(lambda r: body.abort_all or r.rid == body.rid))
        return web.Response()

    async def _update(self, http: web.Request) -> web.Response:
        body = await _read(http, wire.UpdateBody)
        async with self._updating:  # one at a time, in the order they came: the last one asked for is the one that stays
            try:
                stage = self._model.stage if body.selector == "target" else self._draft().stage
                staged = await asyncio.to_thread(stage, Path(body.model_path))
            except WeightsError as error:
                return web.json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)

            def swap() -> None:
                if body.abort_all_requests:
                    self._scheduler.abort(lambda _: True, "weights were updated")
                if body.selector == "draft":
                    self._draft().swap(staged, body.weight_version)
                    return
                self._scheduler.swap(staged, body.weight_version or self._scheduler.version)

            await self._call(swap)
        return web.json_response({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    def _draft(self) -> Speculator:
        if self._scheduler.speculator is None:
            raise WeightsError("nothing drafts here; start the engine with --draft model, or leave selector out")
        return self._scheduler.speculator

    async def _pause(self, http: web.Request) -> web.Response:
        body = await _read(http, wire.PauseBody)
        await self._call(lambda: self._scheduler.pause(body.mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await self._call(self._scheduler.resume)
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, http: web.Request) -> web.Response:
        await self._call(self._scheduler.flush)
        return web.Response(text="Cache flushed.\n")

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _health_generate(self, http: web.Request) -> web.Response:
        """200 once a generate call would be served: weights are there and the loop answers."""
        if not self._model.loaded:
            raise web.HTTPServiceUnavailable(text="no weights yet: call /update_weights_from_disk first")
        await self._call(lambda: None)
        return web.Response()

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response({"model_path": self._info["model_path"], "weight_version": self._scheduler.version, "is_generation": True})

    async def _server_info(self, http: web.Request) -> web.Response:
        return web.json_response({**self._info, "weight_version": self._scheduler.version})

    async def _loads(self, http: web.Request) -> web.Response:
        s, t = self._scheduler, self._scheduler.tally
        return web.json_response({
            "loads": [{"dp_rank": 0, "num_running_reqs": s.running, "num_waiting_reqs": s.waiting}],
            "running": s.running, "waiting": s.waiting, "generated_tokens": t.generated, "prefilled_tokens": t.prefilled,
            "cached_tokens": t.cached, "steps": t.steps, "busy_seconds": t.seconds, "weight_bytes_read": self._model.bytes_read,
            **(s.speculator.loads if s.speculator else {}),
        })  # fmt: skip

    async def _metrics(self, http: web.Request) -> web.Response:
        """The counters that callers of either engine ask for, under SGLang's names."""
        return web.Response(text=f"sglang:generation_tokens_total {self._scheduler.tally.generated}\n")


def _wake(waiters: list[_Waiter]) -> None:
    for waiter in waiters:
        waiter.changed.set()


def _ignore(_: object) -> None:
    """Drops a result where a call wants none."""


async def _read(http: web.Request, kind: type[B]) -> B:
    """The body as `kind`; an empty one stands for {}. BadRequest with the field's name if it is not of that form."""
    raw = await http.read()
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise wire.BadRequest(wire.explain(error)) from error


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Every error as SGLang words it: {"error": {"message": ...}}."""
    try:
        return await handler(request)
    except wire.BadRequest as error:
        return web.json_response({"error": {"message": str(error), "type": "BadRequestError", "code": 400}}, status=400)
    except web.HTTPException as error:
        return web.json_response({"error": {"message": error.text, "code": error.status}}, status=error.status)
