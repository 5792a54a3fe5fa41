"""An engine that samples nothing and takes as long as a kind of hardware would: it speaks the engines' protocol and waits.

A request holds one of the engine's places for (prompt tokens that it has not seen) / prefill rate + (response tokens) / decode rate seconds;
who finds none waits its turn. What it tells of that are its own clock's seconds. A streamed answer is one increment.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Profile:
    """Tokens a second of one place, and the price of an engine an hour."""

    prefill: float
    decode: float
    price: float


@dataclass
class ThrottledEngine:
    """One engine of `profile`, which serves `places` requests at a time."""

    profile: Profile
    places: int
    _place: asyncio.Semaphore = field(init=False)
    _seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._place = asyncio.Semaphore(self.places)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        trajectory, prompt, tokens = body["rid"].rpartition("/")[0], len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        arrived = time.perf_counter()
        async with self._place:
            entered = time.perf_counter()
            cached = min(self._seen.get(trajectory, 0), prompt - 1)
            await asyncio.sleep((prompt - cached) / self.profile.prefill)
            began = time.perf_counter()
            await asyncio.sleep(tokens / self.profile.decode)
        ended = time.perf_counter()
        self._seen[trajectory] = prompt + tokens
        ids = random.choices(range(1, 257), k=tokens)
        meta: dict[str, Any] = {
            "id": body["rid"], "weight_version": body["extra_key"], "finish_reason": {"type": "length", "length": tokens}, "prompt_tokens": prompt,
            "cached_tokens": cached, "output_token_logprobs": [[-5.5, i, None] for i in ids], "e2e_latency": ended - arrived,
            "queue_time": entered - arrived, "decode_throughput": (tokens - 1) / (ended - began),
        }  # fmt: skip
        reply = {"output_ids": ids, "meta_info": meta}
        if not body["stream"]:
            return web.json_response(reply)
        return web.Response(text=f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


@asynccontextmanager
async def serving(engine: ThrottledEngine) -> AsyncIterator[str]:
    """The URL at which the engine answers, on a free port, until the context ends."""
    app = web.Application(client_max_size=2**24)
    app.add_routes([web.post("/generate", engine.generate)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
