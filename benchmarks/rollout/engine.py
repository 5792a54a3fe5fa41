"""An engine that samples nothing: it speaks the engines' protocol and answers when the trace says. `python -m benchmarks.rollout.engine JSON`.

With `barrier`, turns after the first are answered only once so many trajectories have asked for the same one: rollout by batches.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from benchmarks.rollout.script import parsed, play


@dataclass
class ScriptedEngine:
    """`trace`, `group`, `scale`: as for the environment; `barrier` 0: every trajectory goes on by itself."""

    trace: str
    group: int
    scale: float
    barrier: int = 0
    version: str = "0-0"
    _asked: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    _gates: defaultdict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        attempt, number = parsed(body["rid"])
        turn = play(self.trace, self.group, attempt).turns[number]
        await self._everybody(number)
        version = self.version
        if turn.generate_s:
            await asyncio.sleep(turn.generate_s * self.scale)
        logprobs = [[-0.5, 97, None]] * turn.tokens
        meta = {
            "id": body["rid"], "weight_version": version, "finish_reason": {"type": "stop"}, "prompt_tokens": len(body["input_ids"]),
            "output_token_logprobs": logprobs,
        }  # fmt: skip
        return web.json_response({"output_ids": [97] * turn.tokens, "meta_info": meta})

    async def update_weights(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _everybody(self, turn: int) -> None:
        """Returns once `barrier` trajectories have asked for this turn."""
        if not self.barrier or not turn:
            return
        self._asked[turn] += 1
        gate = self._gates[turn]
        if self._asked[turn] >= self.barrier:
            self._asked[turn] = 0
            self._gates[turn] = asyncio.Event()  # the next batch's
            gate.set()
        await gate.wait()

    def app(self) -> web.Application:
        found = web.Application(client_max_size=2**24)
        found.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/update_weights_from_disk", self.update_weights),
                web.get("/model_info", self.model_info),
            ]
        )
        return found


async def serve(settings: dict[str, Any]) -> None:
    """Serves on a free port, which it prints, until whoever started it closes its input."""
    runner = web.AppRunner(ScriptedEngine(**settings).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
