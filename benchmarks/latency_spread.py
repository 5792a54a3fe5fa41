"""Trajectories that advance on their own against turns that wait for the slowest of a batch, by how far environments' latencies spread.

128 trajectories of 10 turns; a turn is 2 s of generation and a step of normal(10, s) seconds. Both ways are played on real workers by the same
parts; the plain one by an engine that answers turn t + 1 only once all 128 have asked for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from benchmarks.rollout.bed import TASK, Script, train
from benchmarks.rollout.machines import cluster
from benchmarks.traces import load
from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import TaskQuota
from rollart.control.staleness import StalenessWindow

SPREADS = (1, 3, 5, 7, 10)
TRAJECTORIES, GROUP = 128, 8
SCALE, QUICK_SCALE = 1 / 8, 1 / 40
WAYS = {"batch-level": TRAJECTORIES, "trajectory-level": 0}


def ideal(spread: int) -> dict[str, float]:
    """Seconds of both ways by the trace alone: the sum over turns of the slowest, and the slowest sum over turns."""
    trace = load(f"latency_spread_s{spread}")
    turns = np.asarray(trace["turn_latency_s"]) + trace["generation_s"]
    return {"batch-level": float(turns.max(axis=0).sum()), "trajectory-level": float(turns.sum(axis=1).max())}


def ledger() -> Ledger:
    """One batch of 128 trajectories, in groups of 8."""
    quota = TaskQuota(TASK, TRAJECTORIES // GROUP, GROUP, GROUP)
    return Ledger([quota], StalenessWindow(0), FailurePolicy(lease_s=3600.0))


async def compare(spreads: Sequence[int], scale: float) -> list[dict[str, Any]]:
    """A row for each way and spread, the two ways of a spread one after the other; the first of all runs, which warms up, is left out."""
    rows = []
    async with cluster(TRAJECTORIES) as client:
        await train(client, Script("waits:2x0.01", GROUP, 1.0), ledger(), 1, 0.0, "warm-up")
        for spread in spreads:
            for way, barrier in WAYS.items():
                run = await train(client, Script(f"latency_spread:{spread}", GROUP, scale, barrier), ledger(), 1, 0.0, f"{way}-{spread}")
                rows.append(
                    {"case": f"s {spread}, {way}", "way": way, "spread": spread, "ideal_s": ideal(spread)[way], "scale": scale, **run.figures()}
                )
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`speedup`: seconds of the plain way over those of the other. `bound`: the same by the trace, without any overhead. `share_of_bound`:
    the other way's seconds by the trace over the measured ones; what the plain way loses besides doesn't count in its favour."""
    found = {}
    for spread in dict.fromkeys(row["spread"] for row in rows):
        plain, proposed = (next(r for r in rows if r["spread"] == spread and r["way"] == way) for way in WAYS)
        found[f"speedup_s{spread}"] = plain["seconds"] / proposed["seconds"]
        found[f"bound_s{spread}"] = plain["ideal_s"] / proposed["ideal_s"]
        found[f"share_of_bound_s{spread}"] = proposed["ideal_s"] / proposed["seconds"]
    return found


def measure(quick: bool) -> Outcome:
    """Five spreads in about five minutes; quick: two, faster."""
    rows = asyncio.run(compare((1, 10), QUICK_SCALE) if quick else compare(SPREADS, SCALE))
    return Outcome(rows, headline(rows))


def draw(outcome: Outcome) -> Figure:
    """The speed-up by spread, beside what the trace allows."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    spreads = list(dict.fromkeys(row["spread"] for row in outcome.rows))
    axes.plot(spreads, [outcome.headline[f"bound_s{s}"] for s in spreads], "--", color="#a0aec0", label="by the trace, no overhead")
    axes.plot(spreads, [outcome.headline[f"speedup_s{s}"] for s in spreads], "o-", color="#2b6cb0", label="measured")
    axes.set(xlabel="standard deviation of a turn's latency, s (mean 10 s)", ylabel="batch-level over trajectory-level", ylim=(1, None))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    return figure


BENCHMARK = Benchmark("latency_spread", "Trajectory-level rollout against batch-level, by the spread of latencies", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
