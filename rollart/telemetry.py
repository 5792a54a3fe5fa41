"""What a run says of itself while it goes on: metrics lines, stage intervals, token counts, memory and the status that is shown."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from rollart.control.tallies import Tallies
from rollart.dashboard.metrics import MetricsWriter
from rollart.dashboard.progress import Progress
from rollart.dashboard.status import Phase, RunStatus
from rollart.rollout.evaluation import Evaluation
from rollart.training.metrics import StepMetrics
from rollart.types import Batch, Member

SAMPLE_S = 0.5
"""Between two looks at the engines' token counts and the processes' memory."""

MEMORY_S = 2.0
"""Between two looks at memory: the system walks the pages of every process for it."""

RECENT = 64
"""Trajectories a task whose mean score is shown as its reward now."""


class Telemetry:
    """Collects and writes; every number that is shown or stored of a run passes here. `more`: what else a step's line is asked from."""

    def __init__(self, metrics: MetricsWriter, progress: Progress, status: RunStatus) -> None:
        self.metrics, self.progress, self.status = metrics, progress, status
        self._started = time.time()
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._staleness: Counter[int] = Counter()
        self._intervals: list[tuple[str, float, float]] = []
        self._rollout: list[tuple[float, float]] = []
        self._tokens: list[tuple[float, int]] = []
        self._peak = 0
        self.more: list[Callable[[], Mapping[str, Any]]] = []

    # ---- stages

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times what runs inside as an interval of stage `name`."""
        started = time.time()
        try:
            yield
        finally:
            self._intervals.append((name, started, time.time()))

    def phase(self, phase: Phase) -> None:
        """What the run as a whole is about from now on."""
        self.status.phase = phase
        self.show()

    # ---- events

    def observe(self, member: Member) -> None:
        """A trajectory was scored."""
        receipt = member.receipt
        start = receipt.seconds["start"]
        self.status.finished += 1
        self._recent[receipt.attempt.episode.task].append(member.score.value)
        self._rollout.append((start, start + receipt.seconds["total"]))

    def step(
        self, batch: Batch, taught: Batch, trained: StepMetrics, tallies: Tallies, version: str, *, wait_s: float,
        waited: Mapping[str, float], ends: Mapping[str, int],
    ) -> None:  # fmt: skip
        """A training step on `taught`, what there was to learn from of `batch`, ended; writes its line. The batch was waited for `wait_s`
        seconds, and for each task's groups those in `waited`; `ends` counts how attempts have ended so far."""
        fates = tallies.fates
        self._staleness.update(taught.step - m.receipt.first_version for m in taught.members)
        scores: dict[str, list[float]] = defaultdict(list)
        for member in batch.members:
            scores[member.receipt.attempt.episode.task].append(member.score.value)
        line = {
            "kind": "step", "step": batch.step + 1, "version": version, "time": time.time(),
            "seconds": {"wait": wait_s, "train": trained.seconds}, "waited": dict(waited),
            "groups": dict(Counter(group.episode.task for group in batch.groups)),
            "reward": {task: sum(values) / len(values) for task, values in scores.items()},
            "staleness": {str(k): v for k, v in Counter(batch.step - m.receipt.first_version for m in batch.members).items()},
            "fates": dict(fates), "ends": dict(ends),
            "by_task": {task: {fate: asdict(tally) for fate, tally in of_task.items()} for task, of_task in tallies.by_task.items()},
            "tokens": {"trained": trained.tokens, "generated": self._tokens[-1][1] if self._tokens else 0},
            "train": asdict(trained), "in_flight": self.status.in_flight,
        }  # fmt: skip
        for part in self.more:
            line |= part()
        self.metrics.write(line)
        for alarm in trained.alarms:
            self.note(f"step {batch.step + 1}: {alarm}")
        self.status.step, self.status.version = batch.step + 1, version
        self.status.fates, self.status.staleness = dict(fates), dict(self._staleness)
        self._write_intervals()
        self.show()

    def evaluation(self, step: int, evaluation: Evaluation, tasks: list[str]) -> None:
        """An evaluation ended; writes its line."""
        reward = {t: {"mean": evaluation.mean(t), "n": evaluation.count(t)} for t in tasks}
        self.metrics.write(
            {
                "kind": "evaluation",
                "step": step,
                "version": str(evaluation.version),
                "time": time.time(),
                "reward": reward,
                "void": len(evaluation.void),
            }
        )
        self._write_intervals()
        means = ", ".join(f"{t} {r['mean']:.3f}" for t, r in reward.items())
        self.progress.note(f"evaluation of version {evaluation.version} on {sum(r['n'] for r in reward.values())} held-out episodes: {means}")
        if evaluation.void:
            self.progress.note(f"{len(evaluation.void)} episodes could not be evaluated; the last: {evaluation.reason}")

    def note(self, text: str) -> None:
        """Says a line to whoever watches."""
        self.progress.note(text)

    def event(self, text: str, figures: Mapping[str, Any]) -> None:
        """Something around the run happened: says so, and writes its `figures`, of which `kind` is one, as a line."""
        self.note(text)
        self.metrics.write({**figures, "time": time.time(), "step": self.status.step})

    def end(self, state: str) -> None:
        """The run, or this part of it, ended."""
        self._write_intervals()
        self.metrics.write({"kind": "end", "state": state, "time": time.time(), "peak_memory": self._peak, "seconds": time.time() - self._started})

    def show(self) -> None:
        """Draws the status as it is now."""
        s = self.status
        s.seconds = time.time() - self._started
        s.reward = {task: sum(values) / len(values) for task, values in self._recent.items()}
        self.progress.update(s)

    # ---- sampling

    async def sample(self, tokens: Callable[[], Awaitable[int | None]], in_flight: Callable[[], int], awaited: Callable[[], str]) -> None:
        """Looks at tokens, memory and what is in flight every `SAMPLE_S` seconds, until it is cancelled."""
        look_at_memory = 0.0
        while True:
            count = await tokens()
            if count is not None:
                self._tokens.append((time.time(), count))
                self.status.tokens_per_second = _rate(self._tokens[-20:])
            if time.monotonic() >= look_at_memory:
                self._peak = max(self._peak, await asyncio.to_thread(memory_in_use))
                look_at_memory = time.monotonic() + MEMORY_S
            self.status.in_flight, self.status.awaited = in_flight(), awaited()
            self.show()
            await asyncio.sleep(SAMPLE_S)

    def _write_intervals(self) -> None:
        """Writes what is new since the line before. Trajectories overlap by the hundred, so their union is one interval or few."""
        rollout = [("rollout", start, end) for start, end in _union(self._rollout)]
        if self._intervals or rollout:
            self.metrics.write({"kind": "intervals", "intervals": [*self._intervals, *rollout]})
        if self._tokens:
            self.metrics.write({"kind": "tokens", "samples": self._tokens})
        self._intervals, self._rollout, self._tokens = [], [], self._tokens[-1:]


def memory_in_use(process: psutil.Process | None = None) -> int:
    """Bytes that a process (default: this one) and all below it hold: shared pages counted once (Linux' proportional set size), else
    resident sizes."""
    this = process or psutil.Process()
    return sum(_held(each) for each in [this, *this.children(recursive=True)])


def _held(process: psutil.Process) -> int:
    """One file of a few lines tells it; psutil would read every mapping of the process, which costs as much as a small engine."""
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        try:
            return int(process.memory_info().rss)
        except psutil.Error:
            return 0  # it ended between listing and looking
    return next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0)


def _rate(samples: list[tuple[float, int]]) -> float:
    """Tokens a second over (time, count) samples; an engine that was started anew counts from 0 again, and its drop is not a rate."""
    seconds = samples[-1][0] - samples[0][0]
    gained = sum(max(0, after - before) for (_, before), (_, after) in pairwise(samples))
    return gained / seconds if seconds > 0 else 0.0


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
