"""One episode, from reset to its end; owns the turn loop and what is recorded of it. Knows no Dask, no store and no engine's address."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollart.control.failures import Cause
from rollart.control.seeds import derive, environment_seed, sampling_seed
from rollart.control.staleness import StalenessWindow
from rollart.environments.calls import CallPool, CallTimedOut, EnvironmentCalls
from rollart.environments.protocol import Environment, RunIn, Scripted, StepResult
from rollart.types import (
    NOT_SAMPLED,
    Attempt,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Outcome,
    SamplingTransform,
    Segment,
    Trajectory,
)

Generate = Callable[[GenerateRequest], Awaitable[GenerateResult]]


class Codec(Protocol):
    """What the turn loop needs of a tokenizer."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def prompt(self, observations: Sequence[str], last: int | None = None, system: str = "") -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class EpisodeFailed(RuntimeError):
    """The machine, a service or the environment's code failed, not the policy: the attempt is tried again and never scored."""

    def __init__(self, message: str, cause: Cause = "environment") -> None:
        super().__init__(message)
        self.cause: Cause = cause


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an episode: turns, tokens of a response, tokens of the whole trajectory, seconds of a reset, of a step and of its verifier."""

    max_turns: int
    max_new_tokens: int
    max_tokens: int
    reset_s: float = 120.0
    step_s: float = 60.0
    reward_s: float = 60.0


@dataclass(slots=True)
class EpisodeRunner:
    """Plays one attempt. `current_version` is the newest version known here; over-age work stops at the next turn, or at once where
    `stop_for_age` is called. `system` is the message that a chat template puts before all others; `pool` has the threads for calls that block;
    `tell` hears what the attempt is at, in words."""

    codec: Codec
    limits: Limits
    transform: SamplingTransform
    run_seed: int
    lineage: int
    system: str = ""
    run_in: RunIn = "thread"
    window: StalenessWindow | None = None
    current_version: Callable[[], int] = lambda: NOT_SAMPLED
    pool: CallPool = field(default_factory=CallPool)
    tell: Callable[[str], None] = lambda doing: None
    _segment: Segment | None = None
    _playing: asyncio.Task[Any] | None = None
    _stopped: bool = False

    async def play(self, environment: Environment, attempt: Attempt, generate: Generate) -> Trajectory:
        """Lets the policy behind `generate` play; EpisodeFailed if the environment raises."""
        policy = _SampledPlay(self, attempt, generate)
        return await self._run(environment, attempt, policy)

    async def play_script(self, environment: Environment, attempt: Attempt) -> Trajectory:
        """Lets the environment play itself; its actions stand as the sampled tokens, with log-probability 0 and version 0."""
        if not isinstance(environment, Scripted):
            raise EpisodeFailed(f"warm_up.episodes.{attempt.episode.task}: the task's environment has no script(); set it to 0")
        return await self._run(environment, attempt, _ScriptedPlay(self, attempt, environment))

    def stop_for_age(self, newest: int) -> bool:
        """Stops the attempt where it is, be it in a response or a step, if version `newest` has made it too old to be trained on; whether
        it did. What there is of it comes back as `over_age`."""
        if self._segment is None or self._playing is None or self._stopped or not self._over_age(self._segment, newest):
            return False
        if self._playing is asyncio.current_task():  # it has learned of that version by itself, and looks at it at its next turn
            return False
        self._stopped = True
        self._playing.cancel()
        return True

    async def _run(self, environment: Environment, attempt: Attempt, play: _Play) -> Trajectory:
        started = time.time()
        seconds = {"start": started, "reset": 0.0, "step": 0.0, "generate": 0.0}
        segment = Segment(self.transform)
        self._segment, self._playing = segment, asyncio.current_task()
        seed = environment_seed(self.run_seed, attempt.episode)
        calls = EnvironmentCalls(environment, self.run_in, {"reset": self.limits.reset_s, "step": self.limits.step_s}, self.pool)
        told = _Told()
        outcome: Outcome = "over_age"
        try:
            outcome = await self._turns(calls, attempt, play, segment, seed, seconds, told)
        except asyncio.CancelledError:
            if not self._stopped or self._playing is None or self._playing.uncancel():
                raise
        finally:
            self._playing = None
            await calls.close()
        seconds["total"] = time.time() - started
        info = {**told.info, "action": told.actions[-1] if told.actions else "", "actions": told.actions}
        return Trajectory(attempt, uuid.uuid4().hex, self.lineage, seed, [segment], outcome, info, seconds)

    async def _turns(
        self, calls: EnvironmentCalls, attempt: Attempt, play: _Play, segment: Segment, seed: int, seconds: dict[str, float], told: _Told
    ) -> Outcome:
        observations = [_text(await self._call(calls, "reset", seed, attempt, seconds), "reset")]
        for turn in range(self.limits.max_turns):
            prompt = self.codec.prompt(observations, segment.ids[-1] if turn else None, self.system)
            room = self.limits.max_tokens - len(segment) - len(prompt)
            if room < 1:
                if turn == 0:  # nothing of the policy is in it: it can't be scored, and has no version to be as old as
                    raise EpisodeFailed(
                        f"tasks.{attempt.episode.task}.max_tokens: the first prompt has {len(prompt)} tokens and leaves no room for a response "
                        f"in {self.limits.max_tokens}; raise it"
                    )
                return "over_length"
            segment.append_prompt(prompt)
            if segment.turns and self._over_age(segment, self.current_version()):
                return "over_age"
            action = await play.act(segment, turn, min(room, self.limits.max_new_tokens), seconds)
            told.actions.append(action)
            result = _stepped(await self._call(calls, "step", action, attempt, seconds))
            segment.reward_last_turn(result.reward)
            told.info = result.info
            observations.append(result.observation)
            if result.terminated or result.truncated:
                return "terminated" if result.terminated else "truncated"
        return "truncated"

    def _over_age(self, segment: Segment, newest: int) -> bool:
        if self.window is None or not segment.turns:
            return False
        return self.window.expired(segment.versions[segment.turns[0].start], newest)

    async def _call(self, calls: EnvironmentCalls, method: str, argument: Any, attempt: Attempt, seconds: dict[str, float]) -> Any:
        """What the environment's method returns; what it raises, or a limit that it outlasts, is its failure, not the policy's."""
        started = time.perf_counter()
        self.tell(f"in {method}")
        try:
            return await calls.call(method, argument)
        except CallTimedOut as error:
            raise EpisodeFailed(f"{error} (tasks.{attempt.episode.task}.{method}_timeout)") from error
        except Exception as error:
            raise EpisodeFailed(f"environment raised in {method}: {type(error).__name__}: {error}") from error
        finally:
            seconds[method] += time.perf_counter() - started


@dataclass(slots=True)
class _Told:
    """What of an episode is stored beside its tokens."""

    actions: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)


def _text(value: Any, stage: str) -> str:
    """An observation; EpisodeFailed unless it is text that has an encoding."""
    if not isinstance(value, str):
        raise EpisodeFailed(f"environment returned {type(value).__name__} from {stage}, where an observation (str) is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EpisodeFailed(f"environment returned an observation from {stage} that is no text: {error}") from error
    return value


def _stepped(value: Any) -> StepResult:
    """What `step` returned; EpisodeFailed unless every part of it can be stored: it shares a file with other trajectories."""
    if not isinstance(value, StepResult):
        raise EpisodeFailed(f"environment returned {type(value).__name__} from step, where a StepResult is needed")
    reward = storable(value.reward, value.info, "environment returned", "step")
    return dataclasses.replace(value, observation=_text(value.observation, "step"), reward=reward)


def storable(reward: Any, info: Any, who: str, stage: str) -> float:
    """The reward as a number; EpisodeFailed unless it and `info` can be stored."""
    try:
        number, stored = float(reward), json.dumps(info)
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeFailed(f"{who} a reward or an info from {stage} that is no number or no JSON: {error}") from error
    if not math.isfinite(number) or not stored.startswith("{"):
        raise EpisodeFailed(f"{who} reward {number} and info {stored[:80]} from {stage}; a finite number and a JSON object are needed")
    return number


class _Play(Protocol):
    async def act(self, segment: Segment, turn: int, max_new_tokens: int, seconds: dict[str, float]) -> str:
        """Appends one response to `segment` and returns its text."""
        ...


class _SampledPlay:
    def __init__(self, runner: EpisodeRunner, attempt: Attempt, generate: Generate) -> None:
        self.runner, self.attempt, self.generate = runner, attempt, generate

    async def act(self, segment: Segment, turn: int, max_new_tokens: int, seconds: dict[str, float]) -> str:
        r = self.runner
        request = GenerateRequest(
            rid=f"{r.lineage}/{self.attempt}/{turn}",
            input_ids=tuple(segment.ids),
            max_new_tokens=max_new_tokens,
            transform=r.transform,
            stop_token_ids=r.codec.eos_ids,
            seed=sampling_seed(r.run_seed, self.attempt, turn),
            return_kept=r.transform.is_cut and self.attempt.episode.purpose == "train",
        )
        started = time.perf_counter()
        result = await self.generate(request)
        seconds["generate"] += time.perf_counter() - started
        if result.finish_reason == "abort":
            raise EpisodeFailed(f"the engine aborted turn {turn} of {self.attempt}", "generation")
        segment.append_response(
            result.ids, result.logprobs, [v.step for v in result.versions], result.finish_reason, result.cached_tokens, result.kept
        )
        return r.codec.decode([i for i in result.ids if i not in r.codec.eos_ids])


class _ScriptedPlay:
    def __init__(self, runner: EpisodeRunner, attempt: Attempt, environment: Scripted) -> None:
        self.runner, self.environment = runner, environment
        e = attempt.episode
        self.rng = random.Random(derive(runner.run_seed, "script", e.purpose, e.task, e.index, attempt.member))

    async def act(self, segment: Segment, turn: int, max_new_tokens: int, seconds: dict[str, float]) -> str:
        codec = self.runner.codec
        action = self.environment.script(self.rng)
        ids = codec.encode(action)
        finish: FinishReason = "length"
        if len(ids) < max_new_tokens:
            ids, finish = [*ids, codec.eos_ids[0]], "stop"
        ids = ids[:max_new_tokens]
        segment.append_response(ids, [0.0] * len(ids), [0] * len(ids), finish)
        return action
