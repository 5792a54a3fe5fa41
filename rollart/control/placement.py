"""Which hardware class should generate for which task, from what was measured; owns the measurements and the decision, moves nothing itself.

A request of task t at an engine of class c holds one of the engine's places for p_t a_tc + d_t b_tc seconds: p_t prompt tokens that are in no
cache at a_tc seconds each, and d_t response tokens at b_tc, both as measured while others were served beside it, its time in the queue left
out. With R_t requests a step, E_c engines of P_c places each, and at most N requests open at a time, a map m of tasks to classes needs

    T(m) = max( max_c W_c / (E_c P_c),  sum_c W_c / N ),    W_c = sum over t with m(t) = c of R_t (p_t a_tc + d_t b_tc)

seconds a step: until the fullest class is through, or, where places are left over, until as many requests as there may be at once are. What
its engines are used for costs C(m) = sum_c price_c W_c / P_c, price times engine-seconds. The best map has the least T(m) C(m)^w: with w = 0
the soonest whatever it costs, with w = 1 at equal times the cheapest; a map that is 10 % dearer has to be 10 w % sooner, about. Where some class
in question has no price, C is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

ENUMERATED = 4096
"""Maps that are all tried; where there are more, the search starts from the map in force and moves one task at a time."""

RECENT = 400
"""Requests of a task at a class that its seconds are the mean of, about: older ones fade, as lengths and loads change in training."""

REFRESHED = 50
"""Steps after which what a class took for a task that is elsewhere is forgotten, and tried anew: the policy has changed by then."""

LATEST = 0.5
"""Weight of the last step in the load of a step, against all steps before."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What some requests of a task took at a class: tokens prefilled and decoded, and the seconds (of a place) for each."""

    requests: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def scaled(self, factor: float) -> Usage:
        return Usage(*(factor * value for value in self.values()))

    def values(self) -> tuple[float, float, float, float, float]:
        return self.requests, self.prefill_tokens, self.decode_tokens, self.prefill_s, self.decode_s

    def seconds(self, load: Usage) -> float:
        """How long (of places) `load` would take at the seconds a token that these requests took."""
        prefill = load.prefill_tokens * self.prefill_s / self.prefill_tokens if self.prefill_tokens else 0.0
        return prefill + (load.decode_tokens * self.decode_s / self.decode_tokens if self.decode_tokens else 0.0)


@dataclass(frozen=True, slots=True)
class EngineClass:
    """The engines of a hardware class that are there now: how many, the requests that each serves at once, and the price of one an hour."""

    engines: int
    places: int
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """`gain`: by how much (of 1) another map has to be better, `patience`: in how many decisions in a row, each on news of what requests took,
    before it comes into force.
    `explore`: requests of a task that a class has to have served before it is judged. `price_weight`: w of the module's text."""

    gain: float = 0.1
    patience: int = 3
    explore: int = 16
    price_weight: float = 0.5

    def __post_init__(self) -> None:
        if self.gain < 0 or self.patience < 1 or self.explore < 1 or not 0 <= self.price_weight <= 1:
            raise ValueError(f"{self}: gain must be 0 or more, patience and explore 1 or more, price_weight within [0, 1]")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step is expected to take on a map: `seconds`, what its engines cost meanwhile (0: some class has no price), and `score`, the lower the
    better."""

    seconds: float
    cost: float
    score: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The map in force from now on, the tasks that it moved (task, from, to), the seconds that a step is expected to take on it and on the
    one that was in force (None: not all of it is measured yet), and why, in words. `explore`: task -> the class to try next."""

    classes: Mapping[str, str]
    moved: tuple[tuple[str, str, str], ...]
    step_s: float | None
    before_s: float | None
    why: str
    explore: Mapping[str, str]


@dataclass(slots=True)
class Placement:
    """Learns from `used` and `stepped`, and says by `decide` where tasks should go. `classes`: the map in force, at first as declared.
    `open_requests`: N of the module's text."""

    classes: dict[str, str]
    rule: PlacementRule = PlacementRule()
    open_requests: float = math.inf
    measured: dict[tuple[str, str], Usage] = field(default_factory=dict)
    loads: dict[str, Usage] = field(default_factory=dict)
    _now: dict[str, Usage] = field(default_factory=dict)
    _steps: int = 0
    _news: bool = False
    _unused: Counter[tuple[str, str]] = field(default_factory=Counter)
    _better: tuple[dict[str, str], int] = field(default_factory=lambda: ({}, 0))

    def used(self, task: str, name: str, usage: Usage) -> None:
        """Requests of `task` ended at class `name`."""
        whole = self.measured.get((task, name), Usage()) + usage
        self.measured[task, name] = whole.scaled(RECENT / whole.requests) if whole.requests > RECENT else whole
        self._now[task] = self._now.get(task, Usage()) + usage
        self._unused[task, name] = 0
        self._news = True

    def stepped(self) -> None:
        """A step ended: what was used since the last one is its load; where steps are so short that several end before anything is told, each
        has its part of it. What nobody has used for long is forgotten."""
        self._steps += 1
        if not self._now:
            return
        for task in {**self.loads, **self._now}:
            latest, before = self._now.get(task, Usage()).scaled(1 / self._steps), self.loads.get(task)
            self.loads[task] = latest if before is None else before.scaled(1 - LATEST) + latest.scaled(LATEST)
        self._now, self._steps = {}, 0
        self._unused.update(self.measured.keys())
        self.measured = {key: usage for key, usage in self.measured.items() if self._unused[key] <= REFRESHED}

    def paces(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Task -> class -> seconds a token, prefilled and decoded, as measured."""
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for (task, name), usage in sorted(self.measured.items()):
            found.setdefault(task, {})[name] = usage.seconds(Usage(prefill_tokens=1)), usage.seconds(Usage(decode_tokens=1))
        return found

    def explore(self, fleet: Mapping[str, EngineClass]) -> dict[str, str]:
        """Task -> the class of `fleet`, in its order, that has served too few of its requests to be judged; none where all have."""
        found: dict[str, str] = {}
        for task in self.classes:
            unknown = [c for c, engines in fleet.items() if engines.engines and self._requests(task, c) < self.rule.explore]
            if unknown:
                found[task] = unknown[0]
        return found

    def decide(self, fleet: Mapping[str, EngineClass]) -> Decision:
        """The map to go on with, among the classes of `fleet` that have an engine; call it once a step, and when engines come or go."""
        there = {name: engines for name, engines in fleet.items() if engines.engines > 0}
        before = dict(self.classes)
        explore = self.explore(there)
        news, self._news = self._news, False
        lost = {t: c for t, c in before.items() if c not in there}
        options = {t: [c for c in there if self._requests(t, c) >= self.rule.explore] for t in before}
        if not all(self.loads.get(t) and options[t] for t in before) or any(c not in options[t] for t, c in before.items() if t not in lost):
            return Decision(before, (), None, None, "not every task has been measured where it is", explore)
        best = min(_maps(before, options, lambda m: self.predict(m, there).score), key=lambda m: self.predict(m, there).score)
        new = self.predict(best, there)
        if lost:
            self.classes, self._better = best, ({}, 0)
            gone = ", ".join(sorted(set(lost.values())))
            return Decision(best, _moved(before, best), new.seconds, None, f"{gone} has no engine any more", explore)
        old = self.predict(before, there)
        gain = old.score / new.score - 1 if new.score > 0 else 0.0
        if best == before or gain <= self.rule.gain:
            self._better = ({}, 0)
            why = "no map is better" if best == before else f"the best map is {gain:.1%} better, which is not over {self.rule.gain:.0%}"
            return Decision(before, (), old.seconds, old.seconds, why, explore)
        seen = self._better[1] + news if self._better[0] == best else 1  # what was seen before is no further evidence
        moves = ", ".join(f"{t} to {best[t]}" for t in best if best[t] != before[t])
        if seen < self.rule.patience:
            self._better = (best, seen)
            return Decision(before, (), old.seconds, old.seconds, f"{moves} is {gain:.0%} better, for {seen} of {self.rule.patience} times", explore)
        self.classes, self._better = best, ({}, 0)
        price = f" for {new.cost / old.cost:.3g} of its price" if old.cost > 0 else ""
        why = f"a step should take {new.seconds:.3g} s and not {old.seconds:.3g} s{price}"
        return Decision(best, _moved(before, best), new.seconds, old.seconds, why, explore)

    def predict(self, classes: Mapping[str, str], fleet: Mapping[str, EngineClass]) -> Prediction:
        """T and T C^w of the module's text for one map, all of which has been measured."""
        work = dict.fromkeys(fleet, 0.0)
        for task, name in classes.items():
            work[name] += self.measured[task, name].seconds(self.loads[task])
        full = max(work[name] / (c.engines * c.places) for name, c in fleet.items())
        seconds = max(full, sum(work.values()) / self.open_requests)
        if any(c.price <= 0 for c in fleet.values()):
            return Prediction(seconds, 0.0, seconds)
        cost = sum(c.price * work[name] / c.places for name, c in fleet.items())
        return Prediction(seconds, cost / 3600, seconds * cost**self.rule.price_weight)

    def _requests(self, task: str, name: str) -> float:
        return self.measured.get((task, name), Usage()).requests


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    return tuple((t, before[t], after[t]) for t in before if after[t] != before[t])


def _maps(before: Mapping[str, str], options: Mapping[str, Sequence[str]], score: Callable[[dict[str, str]], float]) -> Iterator[dict[str, str]]:
    """The maps in question, that in force first where it is one: all of them, or where there are too many those on the way down from it."""
    start = {t: before[t] if before[t] in options[t] else options[t][0] for t in before}
    yield start
    if math.prod(len(o) for o in options.values()) <= ENUMERATED:
        yield from (dict(zip(options, combination, strict=True)) for combination in product(*options.values()))
        return
    while True:
        nearest = min(({**start, t: c} for t, o in options.items() for c in o if c != start[t]), key=score)
        if score(nearest) >= score(start):
            return
        start = nearest
        yield start
