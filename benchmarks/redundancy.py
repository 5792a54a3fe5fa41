"""What second tries are worth where resets are now and then very slow or fail, and what they do to the lengths that are trained on.

Groups of 8, 32 a batch. `before_first_token` gives a second try to a member that is late to begin; `first_finished` launches groups larger and stops
whoever is last. Where length drives latency, lengths are compared by a Kolmogorov-Smirnov test with those of a run without
redundancy on other episodes of the trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.kolmogorov import ks_test
from benchmarks.outcome import Benchmark, Outcome
from benchmarks.rollout.bed import TASK, Script, train
from benchmarks.rollout.machines import cluster
from benchmarks.rollout.script import play
from benchmarks.rollout.virtual import VirtualRun
from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import TaskQuota
from rollart.control.redundancy import Redundancy, RedundancyRule
from rollart.control.staleness import StalenessWindow

RULES: tuple[RedundancyRule, ...] = ("none", "before_first_token", "first_finished")
GROUP, GROUPS, FACTOR = 8, 32, 1.3
SLOTS = 352
"""As many as first_finished can use: the others have the same."""

RESETS, LENGTHS = "resets_and_failures", "length_drives_latency"
SCALE, QUICK_SCALE = 1 / 20, 1 / 100
STEPS = {RESETS: 5, LENGTHS: 3}
QUICK_STEPS = {RESETS: 1, LENGTHS: 1}


def ledger(rule: RedundancyRule, groups: int = GROUPS) -> Ledger:
    quota = TaskQuota(TASK, groups, GROUP, GROUP, spread=False)
    policy = FailurePolicy(attempts=10, lease_s=36_000.0)
    return Ledger([quota], StalenessWindow(0), policy, redundancy=Redundancy(rule, FACTOR))


def trace_of(kind: str, rule: RedundancyRule) -> str:
    """The run without redundancy plays other episodes where lengths are compared, so that the two samples are independent."""
    return f"{LENGTHS}:{STEPS[LENGTHS] * GROUPS}" if (kind, rule) == (LENGTHS, "none") else kind


async def compare(steps: Mapping[str, int], scale: float) -> list[dict[str, Any]]:
    """A row for each trace and rule, one run after the other on the same workers."""
    rows = []
    async with cluster(SLOTS) as client:
        await train(client, Script("waits:1x0.01", GROUP, 1.0), ledger("none"), 1, 0.0, "warm-up")
        for kind in (RESETS, LENGTHS):
            for rule in RULES:
                planned, trace = ledger(rule), trace_of(kind, rule)
                run = await train(client, Script(trace, GROUP, scale), planned, steps[kind], 0.0, f"{kind}-{rule}")
                lengths = [m.receipt.sampled for batch in run.batches for m in batch.members]
                virtual = VirtualRun(ledger(rule), partial(play, trace, GROUP), SLOTS, 0.0).run(steps[kind])
                rows.append(
                    {
                        "case": f"{kind}, {rule}", "trace": kind, "rule": rule, "steps": steps[kind], "scale": scale,
                        "virtual_s": virtual.trained[-1], **run.figures(), "ends": dict(planned.ends), "fates": dict(planned.fates),
                        **({"mean_length": fmean(lengths), "lengths": lengths} if kind == LENGTHS else {}),
                    }
                )  # fmt: skip
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`speedup`: seconds without redundancy over those of the default rule. `length_shift_p`: chance of lengths as far from those of a run without
    redundancy, if the rule shifted nothing; `length_ratio`: their mean over that run's."""

    def row(kind: str, rule: str) -> Mapping[str, Any]:
        return next(r for r in rows if (r["trace"], r["rule"]) == (kind, rule))

    found = {}
    plain, reference = row(RESETS, "none"), row(LENGTHS, "none")
    for rule, end in (("before_first_token", ""), ("first_finished", "_first_finished")):
        found[f"speedup{end}"] = plain["seconds"] / row(RESETS, rule)["seconds"]
        found[f"virtual_speedup{end}"] = plain["virtual_s"] / row(RESETS, rule)["virtual_s"]
        found[f"length_shift_p{end}"] = ks_test(row(LENGTHS, rule)["lengths"], reference["lengths"])[1]
        found[f"length_ratio{end}"] = row(LENGTHS, rule)["mean_length"] / reference["mean_length"]
    return found


def measure(quick: bool) -> Outcome:
    """Two traces and three rules in about five minutes; quick: one batch each, faster."""
    rows = asyncio.run(compare(QUICK_STEPS, QUICK_SCALE) if quick else compare(STEPS, SCALE))
    return Outcome(rows, headline(rows))


def draw(outcome: Outcome) -> Figure:
    """Seconds of each batch by rule, and the distribution of trained lengths."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for at, (rule, colour) in enumerate(zip(RULES, ("#4a5568", "#2b6cb0", "#c05621"), strict=True)):
        of_rule = {row["trace"]: row for row in outcome.rows if row["rule"] == rule}
        seconds = np.diff([0.0, *of_rule[RESETS]["trained"]])
        left.bar(at, seconds.mean(), 0.6, color=colour, alpha=0.6)
        left.plot([at] * len(seconds), seconds, "o", color="#1a202c", markersize=4, alpha=0.7)
        lengths = np.sort(of_rule[LENGTHS]["lengths"])
        right.plot(lengths, np.arange(1, lengths.size + 1) / lengths.size, color=colour, label=rule)
    left.set_xticks(range(len(RULES)), [rule.replace("_", " ") for rule in RULES], fontsize=8)
    left.set_ylabel("seconds a batch")
    right.set(xlabel="sampled tokens of a trained trajectory", ylabel="share that is as short", xscale="log")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    return figure


BENCHMARK = Benchmark("redundancy", "Second tries: their speed-up, and whether they shift what is trained on", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
