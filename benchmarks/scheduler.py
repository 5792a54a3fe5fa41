"""What following each trajectory costs Dask's scheduler, which is one process, and how many can be in flight on a worker process.

Trajectories of three turns of waits, which play themselves: nothing is generated, so that what is left is the system's own cost. They go through the
run's dispatcher to workers that write and score them; the score is part of the trajectory's task, or a future of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import psutil
from distributed import Client
from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from benchmarks.rollout.bed import TASK, Script, prepared
from benchmarks.rollout.machines import cluster
from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import TaskQuota
from rollart.control.staleness import StalenessWindow
from rollart.types import Attempt, Episode, Member

SLOTS = 1000
TRACE = "waits:3x1"
SIZES: dict[str, tuple[int, ...]] = {"in the trajectory's task": (1000, 5000, 20_000), "a future of its own": (1000, 5000)}
QUICK_SIZES: dict[str, tuple[int, ...]] = {"in the trajectory's task": (500,), "a future of its own": (500,)}
CROWDS = ((1, 1000, 60.0), (2, 5000, 150.0))
"""Worker processes, trajectories on them at a time, and the seconds that each waits: longer than it takes to start them all."""

QUICK_CROWDS = ((1, 300, 10.0),)
LOOK_S = 0.5
FLUSH_S = 0.25
"""A run's own default."""


class Watched:
    """The scheduler's process: its CPU seconds, and its memory, the most that was seen while it was watched."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before_mb = self.peak_mb = self.memory()
        self._cpu = self.cpu()

    def cpu(self) -> float:
        used = self._process.cpu_times()
        return used.user + used.system

    def memory(self) -> float:
        return self._process.memory_info().rss / 1e6

    async def look(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self.memory())
            await asyncio.sleep(LOOK_S)

    def figures(self) -> dict[str, float]:
        return {"scheduler_cpu_s": self.cpu() - self._cpu, "before_mb": self.before_mb, "peak_mb": self.peak_mb, "after_mb": self.memory()}


def ledger() -> Ledger:
    """None of its decisions are asked for; a bed wants one for what it says of the run."""
    return Ledger([TaskQuota(TASK, 1, 1, 1)], StalenessWindow(0), FailurePolicy())


async def play(client: Client, script: Script, count: int, run: str) -> tuple[dict[str, Any], list[Member]]:
    """`count` trajectories, dispatched at once; what they cost, and what they came to. RuntimeError if one fails."""
    pid = await client.run_on_scheduler(os.getpid)
    own = psutil.Process()
    async with prepared(client, script, ledger(), run) as (dispatcher, _):
        watched, client_before, started = Watched(pid), own.cpu_times(), time.perf_counter()
        looking = asyncio.create_task(watched.look())
        dispatcher.dispatch([Attempt(Episode(TASK, i, "warm_up"), 0) for i in range(count)])
        members: list[Member] = []
        async for ended in dispatcher.ended(600.0):
            for end in ended:
                if end.member is None:
                    raise RuntimeError(f"{end.attempt} failed") from end.error
                members.append(end.member)
            if len(members) >= count:
                break
        wall = time.perf_counter() - started
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        after = own.cpu_times()
        found = {
            "wall_s": wall, **watched.figures(), "client_cpu_s": after.user + after.system - client_before.user - client_before.system,
            "load_1min": round(psutil.getloadavg()[0], 2),
        }  # fmt: skip
        await dispatcher.close()
    return found, members


def at_a_time(spans: Sequence[tuple[float, float]]) -> int:
    """The most of these (start, end) that went on at one instant."""
    most = now = 0
    for _, step in sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]):
        now += step
        most = max(most, now)
    return most


async def costs(sizes: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """A row for each way and size; the scheduler goes on from one to the next, as it does in a run."""
    rows = []
    async with cluster(SLOTS, own_scheduler=True) as client:
        for way in sizes:
            await play(client, Script(TRACE, 1, 0.01, apart=way != next(iter(sizes))), 200, f"warm-up-{len(way)}")
        for way, counts in sizes.items():
            for count in counts:
                script = Script(TRACE, 1, 1.0, apart=way != next(iter(sizes)), flush_s=FLUSH_S)
                found, _ = await play(client, script, count, f"{count}-{len(way)}")
                rows.append({"case": f"{count:,}, score {way}", "kind": "cost", "way": way, "trajectories": count, **found})
    return rows


async def crowd(workers: int, count: int, seconds: float) -> dict[str, Any]:
    """As many at a time as there are slots; when each one started and ended, by its own record."""
    async with cluster(count, workers, own_scheduler=True) as client:
        found, members = await play(client, Script(f"waits:1x{seconds}", 1, 1.0, flush_s=FLUSH_S), count, f"crowd-{count}")
    starts = [m.receipt.seconds["start"] for m in members]
    first = min(starts)
    spans = sorted((round(start - first, 2), round(start - first + m.receipt.seconds["total"], 2)) for start, m in zip(starts, members, strict=True))
    return {
        "case": f"{count:,} at a time, {workers} worker{'s' if workers > 1 else ''}", "kind": "crowd", "way": "in the trajectory's task",
        "trajectories": count, "workers": workers, **found, "spans": spans,
    }  # fmt: skip


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`scheduler_cpu_ms_per_trajectory`: of the most trajectories that were played, and by number; `in_flight`: the most at one instant."""
    found: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "cost":
            end = "" if row["way"] == rows[0]["way"] else "_apart"
            each = row["scheduler_cpu_s"] / row["trajectories"] * 1e3
            found[f"scheduler_cpu_ms_per_trajectory{end}_{row['trajectories']}"] = each
            found[f"scheduler_cpu_ms_per_trajectory{end}"] = each  # the last is the largest
            found[f"scheduler_grew_mb{end}_{row['trajectories']}"] = row["peak_mb"] - row["before_mb"]
            found[f"scheduler_kept_mb{end}_{row['trajectories']}"] = row["after_mb"] - row["before_mb"]
        elif row["workers"] == 1:
            found["in_flight_per_worker"] = float(at_a_time(row["spans"]))
        else:
            found["in_flight"] = float(at_a_time(row["spans"]))
    return found


def measure(quick: bool) -> Outcome:
    """1,000, 5,000 and 20,000 trajectories, then 1,000 at a time on one worker and 5,000 on two; quick: a few hundred."""

    async def all_rows() -> list[dict[str, Any]]:
        rows = await costs(QUICK_SIZES if quick else SIZES)
        return rows + [await crowd(*each) for each in (QUICK_CROWDS if quick else CROWDS)]

    rows = asyncio.run(all_rows())
    return Outcome(rows, headline(rows))


def draw(outcome: Outcome) -> Figure:
    """The scheduler's CPU time by trajectories, and how many were in flight over time."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way, colour in zip(SIZES, ("#2b6cb0", "#a0aec0"), strict=True):
        rows = [row for row in outcome.rows if row["kind"] == "cost" and row["way"] == way]
        left.plot(
            [r["trajectories"] for r in rows],
            [r["scheduler_cpu_s"] / r["trajectories"] * 1e3 for r in rows],
            "o-",
            color=colour,
            label=f"score {way}",
        )
    left.set(xlabel="trajectories", ylabel="scheduler CPU, ms a trajectory", xscale="log", ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    for row in (row for row in outcome.rows if row["kind"] == "crowd"):
        events = sorted([(start, 1) for start, _ in row["spans"]] + [(end, -1) for _, end in row["spans"]])
        right.step([at for at, _ in events], list(accumulate(step for _, step in events)), label=row["case"])
    right.set(xlabel="seconds", ylabel="trajectories in flight")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.94))
    return figure


BENCHMARK = Benchmark("scheduler", "What following each trajectory costs the scheduler, and how many go at a time", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
