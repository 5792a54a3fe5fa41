"""What rollout that goes on while the trainer works is worth where responses have a long tail: alpha 1 and 2 against 0, by `train.short`.

`wait` holds a step for trajectories that would be too old for the next one; `fill` takes others in their place, and they are dropped. Groups
of one trajectory, so that no group is held by a slow member; figures in virtual time are given for groups of eight as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from benchmarks.rollout.bed import TASK, Script, train
from benchmarks.rollout.machines import cluster
from benchmarks.rollout.script import play
from benchmarks.rollout.virtual import VirtualRun, one_by_one
from benchmarks.traces import load
from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import ShortRule, TaskQuota
from rollart.control.staleness import StalenessWindow
from rollart.types import Attempt, Batch, Episode

TRACE = "long_tail"
SCALE, QUICK_SCALE = 1 / 20, 1 / 40
STEPS, QUICK_STEPS = 20, 4
GROUPS = (1, 8)
WAYS: dict[str, tuple[int, ShortRule]] = {
    "synchronous": (0, "wait"),
    "alpha 1, wait": (1, "wait"),
    "alpha 1, fill": (1, "fill"),
    "alpha 2, wait": (2, "wait"),
    "alpha 2, fill": (2, "fill"),
}


def ledger(way: str, group: int) -> Ledger:
    """Batches as large as the trace's, in groups of `group`; every group teaches."""
    alpha, short = WAYS[way]
    quota = TaskQuota(TASK, load(TRACE)["batch"] // group, group, group, spread=False)
    return Ledger([quota], StalenessWindow(alpha), FailurePolicy(lease_s=36_000.0), short=short)


def seconds_of(attempt: Attempt, group: int) -> float:
    return play(TRACE, group, attempt).seconds


def told(found: Ledger, batches: Sequence[Batch], group: int) -> dict[str, Any]:
    """What was trained on and what was not: a rule that drops the slow shifts the mean."""
    trained = [seconds_of(m.receipt.attempt, group) for batch in batches for m in batch.members]
    dropped = sum(count for fate, count in found.fates.items() if fate != "trained")
    ages = [batch.step - m.receipt.first_version for batch in batches for m in batch.members]
    return {"dropped_share": dropped / max(1, dropped + len(trained)), "mean_trained_s": fmean(trained), "mean_staleness": fmean(ages)}


def virtual(way: str, steps: int, group: int) -> dict[str, Any]:
    """The same ledger with no overhead at all."""
    trace, planned = load(TRACE), ledger(way, group)
    run = VirtualRun(planned, lambda attempt: play(TRACE, group, attempt), trace["slots"], trace["train_s"]).run(steps)
    return {
        "case": f"{way}, groups of {group}, virtual time", "way": way, "kind": "virtual", "group": group, "steps": steps,
        "seconds": run.trained[-1], **told(planned, run.batches, group),
    }  # fmt: skip


def without_bubbles(steps: int, group: int) -> float:
    """Seconds of a schedule in which no step but the first waits: until a batch of whole groups can be there, then nothing but steps."""
    trace = load(TRACE)
    count = 2 * trace["batch"]  # what a window of one version lets out at first
    ends = one_by_one([seconds_of(Attempt(Episode(TASK, i // group), i % group), group) for i in range(count)], trace["slots"])
    groups = sorted(max(ends[i : i + group]) for i in range(0, count, group))
    return groups[trace["batch"] // group - 1] + steps * trace["train_s"]


async def compare(steps: int, scale: float) -> list[dict[str, Any]]:
    """A row a way, played on real workers one after the other; the first run, which warms up, is left out."""
    trace, rows = load(TRACE), []
    async with cluster(trace["slots"]) as client:
        await train(client, Script("waits:2x0.01", 1, 1.0), ledger("synchronous", 1), 1, 0.0, "warm-up")
        for way in WAYS:
            planned = ledger(way, 1)
            run = await train(client, Script(TRACE, 1, scale), planned, steps, trace["train_s"], way.replace(", ", "-").replace(" ", "-"))
            rows.append(
                {
                    "case": f"{way}, measured", "way": way, "kind": "measured", "group": 1, "steps": steps, "scale": scale,
                    **run.figures(), **told(planned, run.batches, 1),
                }
            )  # fmt: skip
    return rows


def bounds(steps: int) -> list[dict[str, Any]]:
    """What no overhead at all would reach, and what no schedule could better."""
    return [virtual(way, steps, group) for group in GROUPS for way in WAYS] + [
        {"case": f"no bubbles, groups of {g}", "way": "no bubbles", "kind": "bound", "group": g, "steps": steps, "seconds": without_bubbles(steps, g)}
        for g in GROUPS
    ]


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`speedup`: measured, over the synchronous way. `share_of_bound_wait`: alpha 1's seconds in virtual time over the measured ones, since no
    schedule may leave out a hold that the rule asks for. `share_of_bound_fill`: those of a schedule without bubbles over the measured ones.
    `control_share_of_bound_fill`: the same with alpha 1's seconds in virtual time, so what the ledger's decisions alone lose."""

    def seconds(kind: str, way: str, group: int = 1) -> float:
        return next(row["seconds"] for row in rows if (row["kind"], row["way"], row["group"]) == (kind, way, group))

    found = {}
    for way in list(WAYS)[1:]:
        name = way.replace(" ", "").replace(",", "_")
        found[f"speedup_{name}"] = seconds("measured", "synchronous") / seconds("measured", way)
        for group in GROUPS:
            found[f"virtual_speedup_{name}_groups_of_{group}"] = seconds("virtual", "synchronous", group) / seconds("virtual", way, group)
    found["share_of_bound_wait"] = seconds("virtual", "alpha 1, wait") / seconds("measured", "alpha 1, wait")
    for alpha, end in (("alpha 1", ""), ("alpha 2", "_alpha2")):
        found[f"share_of_bound_fill{end}"] = seconds("bound", "no bubbles") / seconds("measured", f"{alpha}, fill")
        found[f"control_share_of_bound_fill{end}"] = seconds("bound", "no bubbles") / seconds("virtual", f"{alpha}, fill")
    return found


def measure(quick: bool) -> Outcome:
    """Five ways, 20 steps each, in about seven minutes; quick: 4 steps, twice as fast, which shows that it runs."""
    steps = QUICK_STEPS if quick else STEPS
    rows = asyncio.run(compare(steps, QUICK_SCALE if quick else SCALE)) + bounds(steps)
    return Outcome(rows, headline(rows))


def draw(outcome: Outcome) -> Figure:
    """When each way's steps ended, and the speed-up of each beside what it is in virtual time."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(WAYS, ("#4a5568", "#90cdf4", "#2b6cb0", "#fbd38d", "#c05621"), strict=True))
    measured = [row for row in outcome.rows if row["kind"] == "measured"]
    for row in measured:
        left.plot(row["trained"], range(1, len(row["trained"]) + 1), "-", color=colours[row["way"]], label=row["way"])
    left.set(xlabel="seconds of the trace", ylabel="steps")
    left.legend(frameon=False, fontsize=8)
    names = {way: way.replace(" ", "").replace(",", "_") for way in list(WAYS)[1:]}
    for at, (way, name) in enumerate(names.items()):
        right.bar(at - 0.2, outcome.headline[f"speedup_{name}"], 0.38, color=colours[way])
        right.bar(at + 0.2, outcome.headline[f"virtual_speedup_{name}_groups_of_1"], 0.38, color="none", edgecolor="#4a5568", linestyle="--")
    right.set_xticks(range(len(names)), [way.replace(", ", "\n") for way in names], fontsize=8)
    right.set_ylabel("speed-up (dashed: virtual time)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    return figure


BENCHMARK = Benchmark("asynchrony", "Training beside rollout against taking turns, on responses with a long tail", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
