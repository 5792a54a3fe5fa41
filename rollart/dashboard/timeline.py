"""Turns stage intervals and token counts into time by stage, overlap and idleness. Pure: reads no clock and no file.

All times are seconds on one clock. A span is a (start, end) pair; a list of spans is *disjoint* when sorted without overlap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["Interval", "Span", "Usage", "clip", "intersect", "length", "measure", "spans_by_stage", "subtract", "tokens_within", "union"]

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Interval:
    """`stage` ran from `start` to `end`; `tokens` is what it produced or consumed, 0 where that means nothing."""

    stage: str
    start: float
    end: float
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"an interval of stage {self.stage} ends at {self.end}, before its start {self.start}")


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as disjoint spans; touching ones become one, empty ones vanish."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The time that stands in both of two disjoint lists."""
    common: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(spans: Sequence[Span], away: Sequence[Span]) -> list[Span]:
    """The time of the disjoint `spans` that is not in the disjoint `away`."""
    rest: list[Span] = []
    for start, end in spans:
        at = start
        for gone_start, gone_end in intersect([(start, end)], away):
            if at < gone_start:
                rest.append((at, gone_start))
            at = gone_end
        if at < end:
            rest.append((at, end))
    return rest


def clip(spans: Sequence[Span], window: Span) -> list[Span]:
    """The part of the disjoint `spans` inside `window`."""
    return intersect(spans, union([window]))


def length(spans: Iterable[Span]) -> float:
    """Seconds covered by disjoint spans."""
    return sum(end - start for start, end in spans)


def spans_by_stage(intervals: Iterable[Interval]) -> dict[str, list[Span]]:
    """Disjoint spans in which at least one interval of the stage runs, by stage in order of first appearance."""
    found: dict[str, list[Span]] = {}
    for interval in intervals:
        found.setdefault(interval.stage, []).append((interval.start, interval.end))
    return {stage: union(spans) for stage, spans in found.items()}


def tokens_within(samples: Sequence[tuple[float, float]], spans: Sequence[Span]) -> float:
    """Tokens counted during disjoint `spans`, from cumulative (time, tokens) samples sorted by time.

    Between samples the count is taken to grow evenly; outside of them it does not grow. A count that falls means that its counter started
    anew (an engine was replaced): the fall itself counts nothing.
    """
    times = [t for t, _ in samples]
    risen = [0.0]
    for (_, before), (_, after) in pairwise(samples):
        risen.append(risen[-1] + max(after - before, 0.0))

    def at(time: float) -> float:
        right = bisect_right(times, time)
        if right == 0:
            return 0.0
        if right == len(times):
            return risen[-1]
        passed = (time - times[right - 1]) / (times[right] - times[right - 1])
        return risen[right - 1] + passed * (risen[right] - risen[right - 1])

    return sum(at(end) - at(start) for start, end in spans) if samples else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """How the stages shared the time of one or more stretches of a run; `+` joins stretches, so that the gap between two counts as nothing.

    `window` seconds run from the first to the last moment of any stage, `loop` seconds from the first to the last of training or
    rollout. `stages` holds seconds in which a stage ran at all. `overlap` seconds have training and rollout at once. Tokens and
    seconds `busy` are those while the trainer works, `idle` those while it does not and rollout runs; both only where tokens were counted.
    """

    window: float = 0.0
    loop: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    train: float = 0.0
    overlap: float = 0.0
    busy_seconds: float = 0.0
    busy_tokens: float = 0.0
    idle_seconds: float = 0.0
    idle_tokens: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        stages = {s: self.stages.get(s, 0.0) + other.stages.get(s, 0.0) for s in [*self.stages, *other.stages]}
        return Usage(
            self.window + other.window, self.loop + other.loop, stages, self.train + other.train, self.overlap + other.overlap,
            self.busy_seconds + other.busy_seconds, self.busy_tokens + other.busy_tokens,
            self.idle_seconds + other.idle_seconds, self.idle_tokens + other.idle_tokens,
        )  # fmt: skip

    @property
    def shares(self) -> dict[str, float]:
        """Each stage's share of the window; they may add up to more than 1, since stages overlap."""
        return {stage: _ratio(seconds, self.window) or 0.0 for stage, seconds in self.stages.items()}

    @property
    def overlap_share(self) -> float | None:
        """Share of the training time in which rollout ran too, None without training."""
        return _ratio(self.overlap, self.train)

    @property
    def trainer_idle_share(self) -> float | None:
        """Share of the loop's time in which no training step ran."""
        busy = _ratio(self.train, self.loop)
        return None if busy is None else 1.0 - busy

    @property
    def rate_while_training(self) -> float | None:
        """Rollout tokens a second while the trainer works."""
        return _ratio(self.busy_tokens, self.busy_seconds)

    @property
    def rate_while_idle(self) -> float | None:
        """Rollout tokens a second while the trainer is idle and rollout runs."""
        return _ratio(self.idle_tokens, self.idle_seconds)

    @property
    def rate_ratio(self) -> float | None:
        """`rate_while_training` over `rate_while_idle`: 1 when training costs rollout nothing, 0 when they take turns."""
        busy, idle = self.rate_while_training, self.rate_while_idle
        return None if busy is None or idle is None else _ratio(busy, idle)


def measure(
    intervals: Sequence[Interval],
    samples: Sequence[tuple[float, float]] = (),
    train: str = "train",
    rollout: str = "rollout",
    evaluate: str = "evaluate",
) -> Usage:
    """Accounts for one unbroken stretch of a run.

    `samples` are cumulative (time, tokens) counts of generation, sorted by time. Rates are taken only between the first and the last of
    them. The idle rate is taken only while `rollout` runs, so that time in which nothing was asked of the engines does not make it look
    slow, and not while anything is evaluated, whose tokens are not rollout's. The rate while training covers all of the training
    time, so that a trainer that alternates with rollout shows.
    """
    stages = spans_by_stage(intervals)
    if not any(stages.values()):
        return Usage(stages=dict.fromkeys(stages, 0.0))
    training, rolling = stages.get(train, []), stages.get(rollout, [])
    whole = union(span for spans in stages.values() for span in spans)
    loop = union([*training, *rolling])
    sampled = (samples[0][0], samples[-1][0]) if samples else (0.0, 0.0)
    measuring = stages.get(evaluate, [])
    busy, idle = clip(training, sampled), clip(subtract(subtract(rolling, training), measuring), sampled)
    return Usage(
        window=whole[-1][1] - whole[0][0],
        loop=loop[-1][1] - loop[0][0] if loop else 0.0,
        stages={stage: length(spans) for stage, spans in stages.items()},
        train=length(training),
        overlap=length(intersect(training, rolling)),
        busy_seconds=length(busy),
        busy_tokens=tokens_within(samples, busy),
        idle_seconds=length(idle),
        idle_tokens=tokens_within(samples, idle),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
