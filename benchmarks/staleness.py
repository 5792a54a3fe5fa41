"""What staleness costs: the quick start's tasks trained at alpha 0, 1 and 2 over five seeds, from one warm-up a seed.

The criterion, set before the first run: alpha reaches the reward of alpha 0 within noise if the 95 % t interval over the seeds of the
paired difference (same seed, same warm-up, same held-out episodes) includes 0, or has its lower end above -0.03. Its width says how
large a loss such a study could miss. The reward is the mean over the tasks of the mean score on held-out episodes after the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from benchmarks.staleness_runs import KEPT, QUICK, Scale, Way, rows
from rollart.dashboard.estimates import Estimate, mean_estimate

TOLERATED = -0.03
WAYS = tuple(Way(f"alpha {alpha}", (f"train.alpha={alpha}",)) for alpha in range(3))
COLOURS = ("#2f6db3", "#d9572b", "#2f9e6e", "#7c5cbf")
SMOOTHED = 5
"""Steps that a point of the drawn curves is the mean of."""

Rows = Sequence[Mapping[str, Any]]


def of_way(rows: Rows, way: str, figure: str) -> dict[int, float]:
    """Seed to figure, of one way."""
    return {row["seed"]: row[figure] for row in rows if row["way"] == way}


def difference(rows: Rows, way: str, baseline: str = "alpha 0") -> Estimate:
    """The final reward of `way` minus that of `baseline`, paired by seed."""
    one, other = of_way(rows, way, "after"), of_way(rows, baseline, "after")
    return mean_estimate([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def within_noise(found: Estimate) -> bool:
    """The criterion of this module's docstring; with one seed the interval is infinite, and nothing is shown."""
    return found.n > 1 and (found.low <= 0 <= found.high or found.low > TOLERATED)


def headline(rows: Rows) -> dict[str, float]:
    """Each way's mean and interval over the seeds, and its paired difference from the first way; intervals only of two seeds and more."""
    found: dict[str, float] = {}
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for way in ways:
        key = way.replace(" ", "_")
        found |= _told(f"{key}_reward", mean_estimate(list(of_way(rows, way, "after").values())))
        found |= _told(f"{key}_rise", mean_estimate([row["after"] - row["before"] for row in rows if row["way"] == way]))
        if way != ways[0]:
            paired = difference(rows, way, ways[0])
            found |= {**_told(f"{key}_difference", paired), f"{key}_within_noise": float(within_noise(paired))}
    return found


def _told(name: str, estimate: Estimate) -> dict[str, float]:
    if estimate.n < 2:
        return {name: estimate.mean}
    return {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def study(ways: Sequence[Way], quick: bool) -> Outcome:
    """All runs of these ways that are not kept yet, and what they come to."""
    found = rows(ways, QUICK, Path(f"{KEPT}-quick")) if quick else rows(ways, Scale(), KEPT)
    return Outcome(found, headline(found))


def measure(quick: bool) -> Outcome:
    """Fifteen runs, kept in `runs/staleness` as they end; quick: one short seed, which shows that it runs and not what staleness costs."""
    return study(WAYS, quick)


def draw(outcome: Outcome) -> Figure:
    """Training reward by step (mean and range over the seeds), final rewards by seed, and the trained tokens by staleness."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    ways = list(dict.fromkeys(row["way"] for row in outcome.rows))
    finals = {way: of_way(outcome.rows, way, "after") for way in ways}
    for seed in finals[ways[0]]:
        middle.plot(range(len(ways)), [finals[way].get(seed, np.nan) for way in ways], "-", color="#cbd5e0", linewidth=1, zorder=1)
    for place, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
        curves = [smoothed(row["curve"]) for row in outcome.rows if row["way"] == way]
        steps = np.arange(len(curves[0])) + 1
        left.plot(steps, np.mean(curves, axis=0), color=colour, label=way)
        left.fill_between(steps, np.min(curves, axis=0), np.max(curves, axis=0), color=colour, alpha=0.12, linewidth=0)
        middle.plot([place] * len(finals[way]), list(finals[way].values()), "o", color=colour, markersize=4, zorder=2)
        estimate = mean_estimate(list(finals[way].values()))
        if estimate.n > 1:
            middle.errorbar(place + 0.18, estimate.mean, estimate.high - estimate.mean, fmt="_", color=colour, capsize=3, zorder=2)
        _stack(right, place, [row["stale_tokens"] for row in outcome.rows if row["way"] == way])
    left.set(xlabel="training steps", ylabel=f"reward of the batch, mean of {SMOOTHED} steps")
    left.legend(frameon=False, fontsize=8)
    middle.set_ylabel("reward on held-out episodes")
    right.set_ylabel("trained tokens by staleness")
    for axes in (middle, right):
        axes.set_xticks(range(len(ways)), ways, fontsize=8)
        axes.set_xlim(-0.6, len(ways) - 0.4)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    return figure


def smoothed(curve: Sequence[float]) -> list[float]:
    """The mean of each step and the ones before it, `SMOOTHED` in all."""
    return [float(np.mean(curve[max(0, i + 1 - SMOOTHED) : i + 1])) for i in range(len(curve))]


def _stack(axes: Any, place: int, shares: Sequence[Mapping[str, float]]) -> None:
    """One bar of the shares by staleness, means over the runs; the oldest is darkest."""
    ages = sorted({int(age) for share in shares for age in share})
    bottom = 0.0
    for age in ages:
        height = float(np.mean([share.get(str(age), 0.0) for share in shares]))
        axes.bar(place, height, 0.6, bottom, color=("#dbe4f0", "#90a8c8", "#46628c", "#1a2f52")[min(age, 3)])
        if height > 0.06:
            colour = "#ffffff" if age > 1 else "#1a202c"
            axes.text(place, bottom + height / 2, f"{age}: {height:.0%}", ha="center", va="center", fontsize=7, color=colour)
        bottom += height


BENCHMARK = Benchmark("staleness", "Reward at alpha 0, 1 and 2, from the same start", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
