"""What is scripted of a rollout on real workers: the environment, and the plugin that tells it whose attempt it is. Sleeps, computes nothing."""

from __future__ import annotations

import asyncio
import logging
import random
from contextvars import ContextVar

from distributed import Worker

from benchmarks.rollout.script import Play, play
from rollart.environments.protocol import StepResult
from rollart.rollout.episode import EpisodeRunner
from rollart.rollout.worker import EnvironmentPlugin
from rollart.types import Attempt

PLAYED: ContextVar[Attempt] = ContextVar("played")
"""The attempt that the running task plays: an environment is told a seed alone, and a trace knows attempts."""


class TracedPlugin(EnvironmentPlugin):
    """The worker's own plugin, which notes whose attempt a trajectory's task plays."""

    async def setup(self, worker: Worker) -> None:
        logging.getLogger("distributed.worker").setLevel(logging.ERROR)  # Dask would tell of each attempt that fails as its trace says
        await super().setup(worker)

    def runner(self, attempt: Attempt) -> EpisodeRunner:
        PLAYED.set(attempt)
        return super().runner(attempt)


class ScriptedEnvironment:
    """Takes as long as `trace` says, `scale` seconds for each of its seconds, and raises in `reset` where that fails.

    Its last step ends the episode and scores the member's parity, so that every group has signal.
    """

    def __init__(self, trace: str, group: int, scale: float) -> None:
        self.trace, self.group, self.scale = trace, group, scale
        self._play = Play(0.0, ())
        self._turn = 0
        self._value = 0.0

    async def reset(self, seed: int) -> str:
        attempt = PLAYED.get()
        self._play, self._value = play(self.trace, self.group, attempt), float(attempt.member % 2)
        await self._sleep(self._play.reset_s)
        if self._play.fails:
            raise OSError(f"{attempt} fails at its start, as its trace says")
        return "go"

    async def step(self, action: str) -> StepResult:
        turn, self._turn = self._turn, self._turn + 1
        await self._sleep(self._play.turns[turn].step_s)
        last = self._turn == len(self._play.turns)
        return StepResult("" if last else "on", self._value if last else 0.0, terminated=last)

    def script(self, rng: random.Random) -> str:
        """What it does where it plays itself."""
        return "a"

    async def close(self) -> None:
        """Nothing to give back."""

    async def _sleep(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds * self.scale)
