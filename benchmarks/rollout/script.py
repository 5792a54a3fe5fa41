"""What every attempt of a trace does, and how long each part of it takes: functions of the attempt alone. Plays nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from benchmarks.traces import load
from rollart.control.seeds import derive
from rollart.types import Attempt, Episode

CHARACTERS_A_TOKEN = 8
"""Tokens of the trace for one token that is really sent where lengths matter: lengths keep their shape, and messages stay small."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of generation, then of the environment's step; `tokens` are sampled."""

    generate_s: float
    step_s: float
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Play:
    """An attempt: after `reset_s` its environment raises (`fails`), or its turns follow."""

    reset_s: float
    turns: tuple[Turn, ...]
    fails: bool = False

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.reset_s + (0.0 if self.fails else sum(t.generate_s + t.step_s for t in self.turns))


def play(trace: str, group: int, attempt: Attempt) -> Play:
    """What `attempt` does, of groups of `group` members; another try at a member draws another reset, and samples the same response."""
    kind, _, option = trace.partition(":")
    return KINDS[kind](attempt, group, option)


def place(attempt: Attempt, group: int, count: int, *, of_try: bool = False) -> int:
    """Where in a trace of `count` entries an attempt stands: in order for the members that were planned, anywhere for spares.

    `of_try`: what the machine does rather than the policy, so that each try at a member has its own.
    """
    number = attempt.number if of_try else 0
    if attempt.member < group and number == 0:
        return (attempt.episode.index * group + attempt.member) % count
    return derive(0, "place", attempt.episode.index, attempt.member, number) % count


def latency_spread(attempt: Attempt, group: int, option: str) -> Play:
    """Ten turns whose environment takes normal(10, `option`) seconds."""
    trace = load(f"latency_spread_s{option}")
    turns = trace["turn_latency_s"]
    return Play(0.0, tuple(Turn(trace["generation_s"], s) for s in turns[place(attempt, group, len(turns))]))


def long_tail(attempt: Attempt, group: int, option: str) -> Play:
    """Turns and resets with a tail."""
    found = load("long_tail")["trajectories"]
    one = found[place(attempt, group, len(found))]
    return Play(one["reset_s"], tuple(Turn(0.0, s) for s in one["turn_s"]))


def resets_and_failures(attempt: Attempt, group: int, option: str) -> Play:
    """One turn, after a reset that is now and then very slow, or fails; all three are the machine's doing."""
    trace = load("resets_and_failures")
    at = place(attempt, group, len(trace["reset_s"]), of_try=True)
    return Play(trace["reset_s"][at], (Turn(0.0, trace["run_s"][at]),), trace["fails_at_start"][at])


def length_drives_latency(attempt: Attempt, group: int, option: str) -> Play:
    """One response whose length takes its time, after resets as in `resets_and_failures`; `option` episodes of the trace are passed over."""
    trace, resets = load("length_drives_latency"), load("resets_and_failures")
    count = len(trace["tokens"])
    shifted = int(option or 0) * group
    tokens = trace["tokens"][(place(attempt, group, count) + shifted) % count]
    reset = resets["reset_s"][place(attempt, group, count, of_try=True)]
    return Play(reset, (Turn(tokens * trace["seconds_per_token"], 0.0, max(1, tokens // CHARACTERS_A_TOKEN)),))


def waits(attempt: Attempt, group: int, option: str) -> Play:
    """`option`: turns, "x", seconds of each."""
    turns, _, seconds = option.partition("x")
    return Play(0.0, (Turn(0.0, float(seconds)),) * int(turns))


KINDS: dict[str, Callable[[Attempt, int, str], Play]] = {
    f.__name__: f for f in (latency_spread, long_tail, resets_and_failures, length_drives_latency, waits)
}


@cache
def parsed(rid: str) -> tuple[Attempt, int]:
    """The attempt and the turn that a request's id (`LINEAGE/PURPOSE/TASK/INDEX/MEMBER/NUMBER/TURN`) names."""
    _, purpose, task, index, member, number, turn = rid.split("/")
    episode = Episode(task, int(index), purpose)  # type: ignore[arg-type]
    return Attempt(episode, int(member), int(number)), int(turn)
