"""Speaks SGLang's HTTP API to any engine; owns one session and the errors' types. Chooses no engine and retries nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from rollart.engines.errors import EngineRefused, EngineUnreachable
from rollart.engines.settings import Selector, Swap
from rollart.engines.stream import StreamedReply
from rollart.types import GenerateRequest, GenerateResult

__all__ = ["EngineClient", "EngineLoad", "message_of"]

CONTROL_SECONDS = 30.0
"""How long a control call may take; loading weights and generating have times of their own."""

GENERATED = "sglang:generation_tokens_total"
"""The counter in an engine's metrics; one sample a rank."""

EVENT_BYTES = 2**20
"""What is read ahead of a stream; a line may have twice as many."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests at an engine: those that decode or are about to, and those that wait for room."""

    running: int
    waiting: int


class EngineClient:
    """One HTTP session for all engines of a process. Use it as an async context manager, or call `close`.

    `generate_seconds` bounds one response, None waits as long as the connection lives. Cancelling a call closes its
    connection, upon which the engine aborts the request. Every call raises EngineUnreachable where no answer came, and
    EngineRefused where the answer was an error.
    """

    def __init__(self, generate_seconds: float | None = None, update_seconds: float = 600.0) -> None:
        self._generate_seconds = generate_seconds
        self._update_seconds = update_seconds
        self._open_session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the session; open calls end as EngineUnreachable."""
        if self._open_session is not None:
            await self._open_session.close()
            self._open_session = None

    async def generate(self, url: str, request: GenerateRequest, heard: Callable[[GenerateResult], None] | None = None) -> GenerateResult:
        """One response; `finish_reason` is `abort`, with the tokens so far, if somebody aborted it.

        With `heard` the response is streamed, and `heard` is called with all that there is of it whenever the engine tells of more.
        EngineRefused if the request wants what its cuts kept and the engine doesn't tell that.
        """
        if heard is None:
            whole = await self._json("POST", url, "/generate", request.to_wire(), self._generate_seconds)
            return _with_kept(url, request, _read(url, GenerateResult.from_wire, whole))
        reply, last = StreamedReply(), None
        async with self._answer("POST", url, "/generate", request.to_wire(stream=True), self._generate_seconds) as response:
            async for event in _events(url, response.content):
                last = _read(url, reply.take, event)
                if event["meta_info"]["finish_reason"] is None:
                    heard(last)
                    last = None
        if last is None:
            raise EngineUnreachable(url, "/generate: the stream ended before the response did")
        return _with_kept(url, request, last)

    async def abort(self, url: str, rid: str) -> None:
        """Ends the request called `rid`; its `generate` call returns what there is. ValueError for an empty one."""
        if not rid:
            raise ValueError("rid is empty, and an engine ignores that; use abort_all to end everything")
        await self._call("POST", url, "/abort_request", {"rid": rid}, CONTROL_SECONDS)

    async def abort_all(self, url: str) -> None:
        """Ends every request of the engine."""
        await self._call("POST", url, "/abort_request", {"rid": "", "abort_all": True}, CONTROL_SECONDS)

    async def health(self, url: str, generate: bool = False) -> None:
        """Returns if the engine is up, and with `generate` if it would serve a request; raises otherwise."""
        await self._call("GET", url, "/health_generate" if generate else "/health", None, CONTROL_SECONDS)

    async def model_version(self, url: str) -> str:
        """The version of the weights that the engine serves, as it spells it."""
        body = await self._json("GET", url, "/model_info", None, CONTROL_SECONDS)
        return str(body["weight_version"])

    async def load(self, url: str) -> EngineLoad:
        """What the engine has to do now."""
        ranks = (await self._json("GET", url, "/v1/loads", None, CONTROL_SECONDS))["loads"]
        return EngineLoad(sum(int(r["num_running_reqs"]) for r in ranks), sum(int(r["num_waiting_reqs"]) for r in ranks))

    async def generated_tokens(self, url: str) -> int:
        """Tokens sampled since the engine started, as its metrics count them (SGLang's, with `--enable-metrics`: of responses that have ended)."""
        text = str(await self._call("GET", url, "/metrics", None, CONTROL_SECONDS))
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(GENERATED))
        return sum(int(float(value)) for _, value in samples)

    async def update_weights(self, url: str, path: str, version: str, swap: Swap = "between_steps") -> None:
        """Has the engine load the folder `path` (as the engine sees it) and serve it as `version`; `swap`: what becomes of responses in flight."""
        body: dict[str, Any] = {"model_path": path, "weight_version": version, "load_format": "safetensors"}
        if swap == "between_steps":
            await self._update(url, body)
            return
        async with self._halted(url, swap):
            await self._update(url, {**body, "flush_cache": swap != "in_place"})

    async def update_by_tensors(
        self, url: str, ranks: Sequence[str], selector: Selector, version: str | None, swap: Swap, parts: bool = False
    ) -> None:
        """Has an SGLang server take the tensors that `ranks` describe, one text for each of its ranks, into its policy alone, which it then serves as
        `version`, or into its draft alone, whose version it doesn't know (None). They are a checkpoint's, whole, or each rank's `parts` under
        SGLang's own names. ValueError for a swap that it has not: between_steps."""
        if swap == "between_steps":
            raise ValueError("an SGLang server is halted while it takes tensors: swap is retracting or in_place")
        body: dict[str, Any] = {"serialized_named_tensors": list(ranks), "selector": selector, "flush_cache": swap != "in_place"}
        if parts:
            body["load_format"] = "direct"
        async with self._halted(url, swap):
            await self._done(url, "/begin_weight_update", {"selector": selector})
            try:
                await self._done(url, "/update_weights_from_tensor", body if version is None else {**body, "weight_version": version})
            finally:
                await self._done(url, "/end_weight_update", {})

    @asynccontextmanager
    async def _halted(self, url: str, swap: Swap) -> AsyncIterator[None]:
        # Aborting what is in flight instead would not do: SGLang answers aborted requests before it has let go of them, and an update that
        # comes so soon changes the weights and then fails, since the cache can't be emptied. In place it can't be either, and need not be:
        # old prefixes stay under their own versions' keys.
        await self._call("POST", url, "/pause_generation", {"mode": "in_place" if swap == "in_place" else "retract"}, CONTROL_SECONDS)
        try:
            yield
        finally:
            await self._call("POST", url, "/continue_generation", {}, CONTROL_SECONDS)

    async def update_draft(self, url: str, path: str, version: str) -> None:
        """Has an embedded engine give its draft the weights in the folder `path`, between two steps; the policy's stay."""
        await self._update(url, {"model_path": path, "weight_version": version, "selector": "draft"})

    async def _update(self, url: str, body: dict[str, Any]) -> None:
        await self._done(url, "/update_weights_from_disk", body)

    async def _done(self, url: str, path: str, body: dict[str, Any]) -> None:
        answer = await self._json("POST", url, path, body, self._update_seconds)
        if not answer.get("success"):
            raise EngineRefused(url, 200, str(answer.get("message")))

    async def _json(self, method: str, url: str, path: str, body: Any, seconds: float | None) -> dict[str, Any]:
        answer = await self._call(method, url, path, body, seconds)
        if not isinstance(answer, dict):
            raise EngineRefused(url, 200, f"its reply to {path} is no JSON object")
        return answer

    async def _call(self, method: str, url: str, path: str, body: Any, seconds: float | None) -> Any:
        async with self._answer(method, url, path, body, seconds) as response:
            try:
                return await (response.json() if response.content_type == "application/json" else response.text())
            except ValueError as error:
                raise EngineRefused(url, 200, f"its reply to {path} is no JSON or no text: {error}") from error

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open_session is None:
            # No limit on connections: an engine queues by itself, and a limit here would hide its load from the router. An event of a
            # stream is one line: the tokens since the last one, or all of them from a server that was started otherwise.
            self._open_session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=EVENT_BYTES)
        return self._open_session

    @asynccontextmanager
    async def _answer(self, method: str, url: str, path: str, body: Any, seconds: float | None) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is no error, to be read inside; what goes wrong between here and the engine, then too, ends as EngineUnreachable."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONTROL_SECONDS)
        try:
            async with self._session.request(method, url + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise EngineRefused(url, response.status, message_of(await response.text()))
                yield response
        except TimeoutError as error:
            raise EngineUnreachable(url, f"{path} took longer than {seconds} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(url, f"{path}: {error}") from error
        except LineTooLong as error:
            raise EngineRefused(url, 200, f"a line of its reply to {path} has more than {2 * EVENT_BYTES} bytes") from error


async def _events(url: str, lines: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """The JSON of each server-sent event up to `[DONE]`."""
    async for line in lines:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if data:
            try:
                yield json.loads(data)
            except ValueError as error:
                raise EngineRefused(url, 200, f"an event of its reply to /generate is no JSON: {error}") from error


def _read(url: str, read: Callable[[dict[str, Any]], GenerateResult], body: Any) -> GenerateResult:
    try:
        return read(body)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineRefused(url, 200, f"its reply to /generate cannot be used: {error}") from error


def _with_kept(url: str, request: GenerateRequest, result: GenerateResult) -> GenerateResult:
    if request.return_kept and request.transform.is_cut and result.kept is None:
        raise EngineRefused(url, 200, "it does not tell which ids top_k and top_p kept; use engine.kind embedded, or sample without a cut")
    return result


def message_of(text: str) -> str:
    """The engine's own words in an error reply, whichever of SGLang's three forms it has."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()
    if isinstance(body, dict):
        inner = body.get("error")
        if isinstance(inner, dict):
            return str(inner.get("message"))
        if isinstance(inner, str):
            return inner
        if "message" in body:
            return str(body["message"])
    return text.strip()
