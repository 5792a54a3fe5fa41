"""When silence is worth a look, and what a look has found in words. Decides and spells, asks nobody and reads no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollart.types import Attempt

LINES = 8
"""Lines that tell of what is in flight; what has the most attempts comes first."""

Kind = Literal["held", "working", "queued", "ended", "unanswered", "no_worker", "lost"]
"""Where an attempt is: not handed to the cluster yet; a worker works on it; it waits for a slot there; it has ended and the news is on its way;
its worker does not answer; no worker has its resource; or there is a worker for it and nobody has it."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an attempt is. `where` is a worker's name, or the resource that it waits for; `doing` what the worker does with it, in words, for
    `seconds` by now."""

    attempt: Attempt
    kind: Kind
    where: str = ""
    doing: str = ""
    seconds: float = 0.0


class Silence:
    """Tells when to look: after `first_s` seconds without any end, then each time that the silence has grown twice as long."""

    def __init__(self, first_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._last_s = 0.0

    def due(self, silent_s: float) -> bool:
        """Whether to look now, after `silent_s` seconds of silence; less than the last time means that it was broken between."""
        if silent_s < self._last_s:
            self._next_s = self._first_s
        self._last_s = silent_s
        if silent_s < self._next_s:
            return False
        while self._next_s <= silent_s:
            self._next_s *= 2
        return True


def at_work(found: Iterable[Whereabouts], within_s: float) -> list[Attempt]:
    """The attempts that are taken care of: a worker has them, and one that works on one has gone on to what it does within `within_s`
    seconds; or they have ended, and the news is on its way."""
    return [each.attempt for each in found if each.kind in ("queued", "ended") or (each.kind == "working" and each.seconds < within_s)]


def tell(found: Iterable[Whereabouts]) -> list[str]:
    """What a look has found, one line for each task and place with the most attempts first, `LINES` at most."""
    places: defaultdict[tuple[str, str, str], list[Whereabouts]] = defaultdict(list)
    for each in found:
        episode = each.attempt.episode
        places[episode.purpose, episode.task, _place(each)].append(each)
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"{len(there)} {_played(there)} of {task}{place}{_doings(there)}" for (_, task, place), there in ordered]
    if len(lines) > LINES:
        rest = sum(len(there) for _, there in ordered[LINES - 1 :])
        lines = [*lines[: LINES - 1], f"and {rest} more elsewhere"]
    return lines


def _played(there: list[Whereabouts]) -> str:
    names = {"train": ("trajectory", "trajectories"), "evaluate": ("evaluation", "evaluations"), "warm_up": ("scripted play", "scripted plays")}
    return names[there[0].attempt.episode.purpose][len(there) > 1]


def _place(each: Whereabouts) -> str:
    match each.kind:
        case "held":
            return ": held back until others end"
        case "ended":
            return ": ended, the news of it on its way"
        case "no_worker":
            return f": waiting for a worker with {each.where}, and there is none"
        case "lost":
            return f": lost, with a worker with {each.where} there and none that knows of it"
        case "unanswered":
            return f" on worker {each.where}, which does not answer"
        case "working" | "queued":
            return f" on worker {each.where}"


def _doings(there: list[Whereabouts]) -> str:
    """What one worker does with its attempts: how many do the same, and for how long the oldest of them has."""
    doings: defaultdict[str, list[float]] = defaultdict(list)
    for each in there:
        if each.kind == "queued":
            doings["for a slot"].append(each.seconds)
        elif each.kind == "working":
            doings[each.doing or "at work"].append(each.seconds)
    parts = []
    for doing, seconds in sorted(doings.items(), key=lambda item: (-len(item[1]), item[0])):
        verb = "waiting " if doing.startswith("for ") else ""
        parts.append(f"{len(seconds)} {verb}{doing}" + (f" for {max(seconds):.0f} s" if max(seconds) >= 1 else ""))
    return ": " + ", ".join(parts) if parts else ""


@dataclass(frozen=True, slots=True)
class Absence:
    """`tasks` of the run wait for a worker with `resource`, and for `seconds` by now there has been none."""

    resource: str
    tasks: int
    seconds: float


class Absences:
    """Which resources no worker has while work waits for one: tells each once, after `grace_s` seconds, and when it is over.

    A worker process that died is back within seconds, and the next look finds its tasks elsewhere.
    """

    def __init__(self, grace_s: float, limit_s: float) -> None:
        self._grace_s, self._limit_s = grace_s, limit_s
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def see(self, missing: Mapping[str, int], now: float) -> list[str]:
        """What is to be told, given how many tasks wait in vain for each resource."""
        news = []
        for resource in [r for r in self._since if r not in missing]:
            seconds = now - self._since.pop(resource)
            if resource in self._told:
                self._told.remove(resource)
                news.append(f"nothing waits in vain for the resource {resource} any more, after {seconds:.0f} s")
        for resource, tasks in missing.items():
            if now - self._since.setdefault(resource, now) >= self._grace_s and resource not in self._told:
                self._told.add(resource)
                news.append(
                    f"no worker has the resource {resource} any more: {tasks} tasks wait for one, and the run fails if none is there within "
                    f"{self._limit_s:g} s (rollout.worker_wait)"
                )
        return news

    def hopeless(self, missing: Mapping[str, int], now: float) -> Absence | None:
        """What has been waited for too long, None while there is nothing."""
        for resource, tasks in missing.items():
            seconds = now - self._since.get(resource, now)
            if seconds >= self._limit_s:
                return Absence(resource, tasks, seconds)
        return None


def lost(before: Iterable[Whereabouts], now: Iterable[Whereabouts]) -> list[Attempt]:
    """Attempts that two looks found lost: one look alone may fall between a worker's loss and what Dask does about it."""
    suspects = {w.attempt for w in before if w.kind == "lost"}
    return [w.attempt for w in now if w.kind == "lost" and w.attempt in suspects]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the scheduler has a Dask task: its `state`, the `worker` (address) that was given it, and the `resource` that it wants."""

    state: str
    worker: str | None
    resource: str


def place(attempt: Attempt, keys: Sequence[str], placed: Mapping[str, Placed], resources: Collection[str]) -> Whereabouts | tuple[str, str]:
    """Where an attempt is whose tasks are `keys`, first to last; the worker to ask, and the key to ask for, where the scheduler gave it to one.

    `resources`: those that some worker has that takes tasks.
    """
    if not keys:
        return Whereabouts(attempt, "held")
    for key in keys:
        task = placed.get(key, Placed("forgotten", None, ""))
        if task.state in ("memory", "erred"):
            continue
        if task.worker is not None:
            return task.worker, key
        if task.resource and task.resource not in resources:
            return Whereabouts(attempt, "no_worker", task.resource)
        return Whereabouts(attempt, "lost", task.resource or "its resource")
    return Whereabouts(attempt, "ended")
