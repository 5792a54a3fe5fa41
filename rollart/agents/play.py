"""One attempt of an agent, from its start to its end; owns its limits and what its failures are. Knows no Dask, no store and no engine's address."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollart.agents.answering import Answering, Budget
from rollart.agents.rendering import Rendering
from rollart.agents.server import AgentServer, Bounds
from rollart.agents.tool_calls import ToolFormat
from rollart.control.seeds import environment_seed
from rollart.control.staleness import StalenessWindow
from rollart.environments.calls import CallPool, CallTimedOut, EnvironmentCalls
from rollart.environments.protocol import Agent, AgentResult
from rollart.rollout.episode import EpisodeFailed, Generate, storable
from rollart.types import NOT_SAMPLED, Attempt, Outcome, SamplingTransform, Trajectory

__all__ = ["AgentRunner"]

LEAVE_S = 10.0
"""How long a coroutine that was cancelled is waited for; what swallows its cancellation is left to itself, and its URL answers nothing."""


@dataclass(slots=True)
class AgentRunner:
    """Plays one attempt. `run_s` bounds the agent's whole run; `bounds` what it may send; `budget` what it may sample. The rest is as an
    EpisodeRunner has it."""

    server: AgentServer
    rendering: Rendering
    tool_format: ToolFormat
    budget: Budget
    bounds: Bounds
    run_s: float
    transform: SamplingTransform
    run_seed: int
    lineage: int
    window: StalenessWindow | None = None
    pool: CallPool = field(default_factory=CallPool)
    tell: Callable[[str], None] = lambda doing: None
    _answering: Answering | None = None
    _playing: asyncio.Task[Any] | None = None
    _stopped: bool = False

    async def play(self, agent: Agent, attempt: Attempt, generate: Generate) -> Trajectory:
        """Lets the agent run with the policy behind `generate`; EpisodeFailed if it raises, or is over its limit, or never asks for anything,
        and what `generate` raised where an engine failed it."""
        started = time.time()
        seed = environment_seed(self.run_seed, attempt.episode)
        answering = Answering(
            attempt, f"{self.lineage}/{attempt}", self.rendering, self.tool_format, self.transform, self.budget, self.run_seed, generate, self.tell
        )
        calls = EnvironmentCalls(agent, "thread", {"run": self.run_s}, self.pool)
        self._answering, self._playing = answering, asyncio.current_task()
        outcome: Outcome = "over_age"
        result = AgentResult()
        try:
            try:
                with self.server.serve(answering, self.bounds) as door:
                    self.tell("in run")
                    outcome, result = await self._run(calls, attempt, answering, (seed, door.url, door.key))
            finally:
                answering.end()
        except asyncio.CancelledError:
            if not self._stopped or self._playing is None or self._playing.uncancel():
                raise
        finally:
            self._playing = None
            await calls.close()
        recording = answering.recording
        if recording.last is not None:
            recording.last.reward_last_turn(result.reward)
        total = time.time() - started
        seconds = {"start": started, "reset": 0.0, "step": max(total - answering.seconds, 0.0), "generate": answering.seconds, "total": total}
        texts = answering.texts
        info = {**result.info, "action": texts[-1] if texts else "", "actions": texts}
        if answering.ignored:
            info["ignored_parameters"] = dict(answering.ignored)
        return Trajectory(attempt, uuid.uuid4().hex, self.lineage, seed, recording.segments, outcome, info, seconds)

    def stop_for_age(self, newest: int) -> bool:
        """Stops the attempt where it is if version `newest` has made it too old to be trained on; whether it did. What there is of it comes
        back as `over_age`."""
        if self.window is None or self._answering is None or self._playing is None or self._stopped:
            return False
        oldest = self._answering.recording.oldest
        if oldest == NOT_SAMPLED or not self.window.expired(oldest, newest):
            return False
        self._stopped = True
        self._playing.cancel()
        return True

    async def _run(self, calls: EnvironmentCalls, attempt: Attempt, answering: Answering, given: tuple[int, str, str]) -> tuple[Outcome, AgentResult]:
        running = asyncio.create_task(calls.call("run", *given))
        broken = asyncio.create_task(answering.broken.wait())
        try:
            await asyncio.wait((running, broken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            broken.cancel()
            if not running.done():
                running.cancel()
                _KEPT.add(running)
                running.add_done_callback(_dropped)
                await asyncio.wait((running,), timeout=LEAVE_S)
        if answering.failure is not None:
            raise _of_generation(answering.failure) from answering.failure
        task = attempt.episode.task
        try:
            result = _returned(running.result())
        except EpisodeFailed:
            raise
        except CallTimedOut as error:
            raise EpisodeFailed(f"{error} (tasks.{task}.agent.run_timeout)") from error
        except Exception as error:
            if answering.refused is None or not answering.recording.segments:
                raise EpisodeFailed(_why(task, answering, f"agent raised in run: {type(error).__name__}: {error}")) from error
            return answering.refused, AgentResult(0.0, {"error": f"{type(error).__name__}: {error}"[:1000]})
        if not answering.recording.segments:  # nothing of the policy is in it: it can't be scored, and has no version to be as old as
            raise EpisodeFailed(_why(task, answering, "agent ended without a response of the policy's"))
        if answering.refused is not None:
            return answering.refused, result
        return "truncated" if result.truncated else "terminated", result


def _returned(value: Any) -> AgentResult:
    """What `run` returned; EpisodeFailed unless every part of it can be stored."""
    if not isinstance(value, AgentResult):
        raise EpisodeFailed(f"agent returned {type(value).__name__} from run, where an AgentResult is needed")
    return AgentResult(storable(value.reward, value.info, "agent returned", "run"), value.info, bool(value.truncated))


def _why(task: str, answering: Answering, what: str) -> str:
    if answering.refused == "over_length":
        return f"{what} (tasks.{task}.max_tokens: the first prompt leaves no room for a response; raise it)"
    return what


def _of_generation(error: Exception) -> EpisodeFailed:
    if isinstance(error, EpisodeFailed):
        return EpisodeFailed(str(error), error.cause)
    return EpisodeFailed(f"{type(error).__name__}: {error}", "generation")


_KEPT: set[asyncio.Task[Any]] = set()
"""An event loop holds its tasks weakly."""


def _dropped(running: asyncio.Task[Any]) -> None:
    _KEPT.discard(running)
    if not running.cancelled():
        running.exception()
