"""What a run came to, recomputed from its folder: rewards before and after, fates, staleness, time by stage, memory. Writes nothing."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollart.dashboard.corrections import Agreement, Correction, agreement, corrections
from rollart.dashboard.estimates import Estimate, mean_estimate, rise_estimate
from rollart.dashboard.happenings import Happening, failures, happenings
from rollart.dashboard.metrics import read_metrics
from rollart.dashboard.placed import NOWHERE_ELSE, Placed, placed
from rollart.dashboard.task_rollout import TaskRollout, task_rollouts
from rollart.dashboard.timeline import Interval, Usage, measure
from storage.version import Version

__all__ = ["Evaluation", "Rows", "ScoreTable", "Stretch", "Summary", "TaskSummary", "stretches", "summarize", "summarize_run"]

Row = Mapping[Hashable, Any]


class ScoreTable(Protocol):
    """A pandas DataFrame with one row a member: purpose, task, episode, member, attempt, version, score, first_version, last_version,
    tokens, sampled, turns, outcome, fate, staleness, seconds_total."""

    def to_dict(self, orient: Literal["records"]) -> list[dict[Hashable, Any]]: ...


Rows = ScoreTable | Iterable[Row]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One task measured at one version (its step): the mean over episodes, and each episode's score."""

    version: int
    estimate: Estimate
    scores: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A task's evaluations by version. The first is from before training (after the warm-up), the last from its end."""

    task: str
    evaluations: tuple[Evaluation, ...]

    @property
    def before(self) -> Evaluation:
        return self.evaluations[0]

    @property
    def after(self) -> Evaluation:
        return self.evaluations[-1]

    @property
    def best(self) -> Evaluation:
        return max(self.evaluations, key=lambda e: e.estimate.mean)

    @property
    def rise(self) -> Estimate | None:
        """None if only one version was measured."""
        return rise_estimate(self.before.scores, self.after.scores) if len(self.evaluations) > 1 else None

    @property
    def final_over_best(self) -> float | None:
        """None where the best mean is not over 0."""
        return self.after.estimate.mean / self.best.estimate.mean if self.best.estimate.mean > 0 else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "before": {"version": self.before.version, **self.before.estimate.to_dict()},
            "after": {"version": self.after.version, **self.after.estimate.to_dict()},
            "rise": self.rise.to_dict() if self.rise else None,
            "best": {"version": self.best.version, **self.best.estimate.to_dict()},
            "final_over_best": self.final_over_best,
        }


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was measured between one start or resume of a run and the next: stage intervals and cumulative (time, tokens) samples."""

    intervals: tuple[Interval, ...]
    samples: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run; `peak_memory` is in bytes, of all its processes at once, None if it was not measured. `failures` counts failed
    attempts by cause, `happenings` are what was told of things around the run."""

    tasks: tuple[TaskSummary, ...]
    steps: int
    fates: Mapping[str, int]
    staleness: Mapping[int, int]
    usage: Usage
    tokens_generated: float
    peak_memory: int | None
    corrections: Mapping[int, Correction] = field(default_factory=dict)
    agreement: Agreement | None = None
    rollout: Sequence[TaskRollout] = ()
    placed: Placed = NOWHERE_ELSE
    failures: Mapping[str, int] = field(default_factory=dict)
    happenings: Sequence[Happening] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        use = self.usage
        return {
            "steps": self.steps,
            "reward": {task.task: task.to_dict() for task in self.tasks},
            "fates": dict(self.fates),
            "failures": dict(self.failures),
            "happenings": [each.to_dict() for each in self.happenings],
            "staleness": {str(age): count for age, count in self.staleness.items()},
            "corrections": {str(age): found.to_dict() for age, found in self.corrections.items()},
            "agreement": self.agreement.to_dict() if self.agreement else None,
            "rollout": {found.task: found.to_dict() for found in self.rollout},
            "placed": self.placed.to_dict(),
            "stages": {stage: {"seconds": seconds, "share": use.shares[stage]} for stage, seconds in use.stages.items()},
            "overlap_share": use.overlap_share,
            "trainer_idle_share": use.trainer_idle_share,
            "tokens_per_second": {"while_training": use.rate_while_training, "while_idle": use.rate_while_idle, "ratio": use.rate_ratio},
            "tokens_generated": self.tokens_generated,
            "peak_memory_bytes": self.peak_memory,
        }


def summarize_run(run_url: str, storage_options: Mapping[str, Any] | None, table: Rows) -> Summary:
    """The summary of the run at `run_url`, whose trajectories are `table`. Raises `MetricsError` if its metrics are broken."""
    return summarize(read_metrics(run_url, storage_options), table)


def summarize(lines: Sequence[Mapping[str, Any]], table: Rows) -> Summary:
    """The summary from metrics lines and trajectory rows."""
    rows = table.to_dict("records") if hasattr(table, "to_dict") else list(table)
    train = [row for row in rows if row["purpose"] == "train"]
    parts = stretches(lines)
    usage = Usage()
    for part in parts:
        usage += measure(part.intervals, part.samples)
    memory = [int(line["peak_memory"]) for line in lines if line.get("peak_memory")]
    trained = Counter(int(row["staleness"]) for row in train if row["fate"] == "trained" and _known(row["staleness"]))
    return Summary(
        tasks=_tasks(row for row in rows if row["purpose"] == "evaluate"),
        steps=max((line["step"] for line in lines if line.get("kind") == "step"), default=0),
        fates=dict(Counter(str(row["fate"]) for row in train if _known(row["fate"])).most_common()),
        staleness=dict(sorted(trained.items())),
        usage=usage,
        tokens_generated=float(sum(row["sampled"] for row in rows if _known(row["sampled"]))),
        peak_memory=max(memory, default=None),
        corrections=corrections(lines),
        agreement=agreement(lines),
        rollout=task_rollouts(lines),
        placed=placed(lines),
        failures=failures(lines),
        happenings=happenings(lines),
    )


def stretches(lines: Iterable[Mapping[str, Any]]) -> list[Stretch]:
    """The metrics' intervals and token samples, apart for each time the run was started or resumed.

    Each line holds what is new since the line before.
    """
    found: list[tuple[list[Interval], list[tuple[float, float]]]] = [([], [])]
    for line in lines:
        intervals, samples = found[-1]
        match line.get("kind"):
            case "start" | "resume":
                found.append(([], []))
            case "intervals":
                intervals.extend(Interval(str(stage), start, end) for stage, start, end in line["intervals"])
            case "tokens":
                samples.extend((moment, tokens) for moment, tokens in line["samples"])
    return [
        Stretch(tuple(intervals), tuple(sorted(samples, key=lambda sample: sample[0])))
        for intervals, samples in found
        if intervals or samples
    ]  # fmt: skip


def _tasks(rows: Iterable[Row]) -> tuple[TaskSummary, ...]:
    """Groups evaluation rows by task and version. The unit is the episode: members of one episode are averaged before anything else.

    Left out are rows without a score, those of an abandoned lineage, and those with a token of another version than the one measured.
    """
    scores: dict[str, dict[int, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        if not (_known(row["version"]) and _known(row["score"])):
            continue
        version = _step(row["version"])
        pure = row["first_version"] == version and row["last_version"] == version
        if pure and row["fate"] != "lineage":
            scores[str(row["task"])][version][int(row["episode"])].append(float(row["score"]))
    tasks = []
    for task, versions in sorted(scores.items()):
        evaluations = []
        for version, episodes in sorted(versions.items()):
            means = {episode: sum(values) / len(values) for episode, values in sorted(episodes.items())}
            evaluations.append(Evaluation(version, mean_estimate(list(means.values())), means))
        tasks.append(TaskSummary(task, tuple(evaluations)))
    return tuple(tasks)


def _step(version: Any) -> int:
    return Version.parse(version).step if isinstance(version, str) else int(version)


def _known(value: Any) -> bool:
    """Whether a cell holds something: tables spell a missing value None or NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))
