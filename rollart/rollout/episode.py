"""One episode, from reset to its end; owns the turn loop and what is recorded of it. Knows no Dask, no store and no engine's address."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import math
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollart.control.failures import Cause
from rollart.control.seeds import derive, environment_seed, sampling_seed
from rollart.control.staleness import StalenessWindow
from rollart.environments.protocol import Environment, Scripted, StepResult
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

RunIn = Literal["loop", "thread"]

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
    """Bounds of an episode: turns, tokens of a response, tokens of the whole trajectory."""

    max_turns: int
    max_new_tokens: int
    max_tokens: int


@dataclass(slots=True)
class EpisodeRunner:
    """Plays attempts of one task. `current_version` is the newest version known here; over-age work stops at the next turn. `system` is
    the message that a chat template puts before all others."""

    codec: Codec
    limits: Limits
    transform: SamplingTransform
    run_seed: int
    lineage: int
    system: str = ""
    run_in: RunIn = "thread"
    window: StalenessWindow | None = None
    current_version: Callable[[], int] = lambda: NOT_SAMPLED

    async def play(self, environment: Environment, attempt: Attempt, generate: Generate) -> Trajectory:
        """Lets the policy behind `generate` play; EpisodeFailed if the environment raises."""
        policy = _SampledPlay(self, attempt, generate)
        return await self._run(environment, attempt, policy)

    async def play_script(self, environment: Environment, attempt: Attempt) -> Trajectory:
        """Lets the environment play itself; its actions stand as the sampled tokens, with log-probability 0 and version 0."""
        if not isinstance(environment, Scripted):
            raise EpisodeFailed(f"warm_up.episodes.{attempt.episode.task}: the task's environment has no script(); set it to 0")
        return await self._run(environment, attempt, _ScriptedPlay(self, attempt, environment))

    async def _run(self, environment: Environment, attempt: Attempt, play: _Play) -> Trajectory:
        started = time.time()
        seconds = {"start": started, "reset": 0.0, "step": 0.0, "generate": 0.0}
        segment = Segment(self.transform)
        actions: list[str] = []
        info: dict[str, Any] = {}
        seed = environment_seed(self.run_seed, attempt.episode)
        try:
            observations = [_text(await self._call(seconds, "reset", environment.reset, seed), "reset")]
            outcome: Outcome = "truncated"
            for turn in range(self.limits.max_turns):
                prompt = self.codec.prompt(observations, segment.ids[-1] if turn else None, self.system)
                room = self.limits.max_tokens - len(segment) - len(prompt)
                if room < 1:
                    if turn == 0:  # nothing of the policy is in it: it can't be scored, and has no version to be as old as
                        raise EpisodeFailed(
                            f"tasks.{attempt.episode.task}.max_tokens: the first prompt has {len(prompt)} tokens and leaves no room for a response "
                            f"in {self.limits.max_tokens}; raise it"
                        )
                    outcome = "over_length"
                    break
                segment.append_prompt(prompt)
                if self._over_age(segment):
                    outcome = "over_age"
                    break
                action = await play.act(segment, turn, min(room, self.limits.max_new_tokens), seconds)
                actions.append(action)
                result = _stepped(await self._call(seconds, "step", environment.step, action))
                segment.reward_last_turn(result.reward)
                info = result.info
                observations.append(result.observation)
                if result.terminated or result.truncated:
                    outcome = "terminated" if result.terminated else "truncated"
                    break
        finally:
            await self._close(environment)
        seconds["total"] = time.time() - started
        info = {**info, "action": actions[-1] if actions else "", "actions": actions}
        return Trajectory(attempt, uuid.uuid4().hex, self.lineage, seed, [segment], outcome, info, seconds)

    def _over_age(self, segment: Segment) -> bool:
        if self.window is None or not segment.turns:
            return False
        return self.window.expired(segment.versions[segment.turns[0].start], self.current_version())

    async def _call(self, seconds: dict[str, float], stage: str, function: Callable[..., Any], argument: Any) -> Any:
        """Calls the environment where the task says; what it raises is its failure, not the policy's."""
        started = time.perf_counter()
        try:
            if inspect.iscoroutinefunction(function):
                return await function(argument)
            if self.run_in == "thread":
                return await asyncio.to_thread(function, argument)
            return function(argument)
        except (Exception, SystemExit) as error:  # a program inside may call exit(), which would end the worker
            raise EpisodeFailed(f"environment raised in {stage}: {type(error).__name__}: {error}") from error
        finally:
            seconds[stage] += time.perf_counter() - started

    async def _close(self, environment: Environment) -> None:
        closing = environment.close()
        if inspect.isawaitable(closing):
            await closing


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
    try:
        reward, stored = float(value.reward), json.dumps(value.info)
    except (TypeError, ValueError, RecursionError) as error:
        raise EpisodeFailed(f"environment returned a reward or an info from step that is no number or no JSON: {error}") from error
    if not math.isfinite(reward) or not stored.startswith("{"):
        raise EpisodeFailed(f"environment returned reward {reward} and info {stored[:80]} from step; a finite number and a JSON object are needed")
    return dataclasses.replace(value, observation=_text(value.observation, "step"), reward=reward)


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
        )
        started = time.perf_counter()
        result = await self.generate(request)
        seconds["generate"] += time.perf_counter() - started
        if result.finish_reason == "abort":
            raise EpisodeFailed(f"the engine aborted turn {turn} of {self.attempt}", "generation")
        segment.append_response(result.ids, result.logprobs, [v.step for v in result.versions], result.finish_reason, result.cached_tokens)
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
