"""What a training step costs beside TRL's on the same tokens; what packing, the chunked output layer and a second rank are worth."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from benchmarks.step.comparisons import lengths, memory, rank_rows, smollm2
from benchmarks.step.models import has_smollm2

INSTALL = "SmolLM2-135M is left out; to measure it: make smollm2"
COLOURS = {"rollart": "#2f6db3", "chunked": "#2f6db3", "2 ranks": "#2f6db3", "TRL": "#e0a458"}
OTHER = "#b8c4d6"


def measure(quick: bool) -> Outcome:
    """All of it; quick: without SmolLM2-135M, sequences of one length, and the larger of the models that ranks share."""
    with tempfile.TemporaryDirectory(prefix="rollart-step-") as folder:
        root = Path(folder)
        rows = lengths(root, quick)
        if not quick and has_smollm2():
            rows += smollm2(root)
        elif not quick:
            click.echo(INSTALL, err=True)
        rows += memory(root, quick) + rank_rows(root, quick)
    return Outcome(rows, headline(rows))


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of rounds in pairs, the medians: `ratio_to_trl_*` is trained tokens a second of ours over TRL's, `ratio_to_trl` the least of
    those, `packing_speedup` the same of packed over padded, `ranks_speedup` of two ranks over one; `padding_share` the largest."""
    by_comparison: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        comparison, _, way = row["way"].rpartition(": ")
        by_comparison[comparison][way].append(row)
    ratios: dict[str, float] = {}
    found: dict[str, float] = {}
    for comparison, ways in by_comparison.items():
        label = "".join(c if c.isalnum() else "_" for c in comparison.replace(", ", "_")).lower()
        if "rollart" in ways and "TRL" in ways:
            ratios[f"ratio_to_trl_{label}"] = over(ways, "rollart", "TRL", "tokens_a_second")
        if "rollart, padded" in ways:
            found[f"packing_speedup_{label}"] = over(ways, "rollart", "rollart, padded", "tokens_a_second")
            for way, name in (("rollart", "packed"), ("rollart, padded", "padded"), ("TRL", "trl")):
                found[f"padding_share_{name}_{label}"] = max(row["padding_share"] for row in ways[way])
        if "chunked" in ways:
            found["peak_memory_ratio_chunked"] = over(ways, "chunked", "whole", "peak_mb")
            found["chunked_speed_ratio"] = over(ways, "chunked", "whole", "tokens_a_second")
            if "TRL" in ways:
                found["peak_memory_ratio_to_trl"] = over(ways, "chunked", "TRL", "peak_mb")
        if "2 ranks" in ways:
            found[f"ranks_speedup_{label}"] = over(ways, "2 ranks", "1 rank", "tokens_a_second")
    return {"ratio_to_trl": min(ratios.values())} | ratios | found


def over(ways: Mapping[str, Sequence[Mapping[str, Any]]], one: str, other: str, figure: str) -> float:
    """The median over the rounds of way `one`'s figure over way `other`'s."""
    return median(a[figure] / b[figure] for a, b in zip(ways[one], ways[other], strict=True))


def draw(outcome: Outcome) -> Figure:
    """A panel a comparison: trained tokens a second of each way, a dot a step, a bar at the median."""
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in outcome.rows:
        comparison, _, way = str(row["way"]).rpartition(": ")
        speeds[comparison][way].append(row["tokens_a_second"])
    figure = Figure(figsize=(2.6 * len(speeds), 3.2), layout="constrained")
    for axes, (comparison, ways) in zip(figure.subplots(1, len(speeds), squeeze=False)[0], speeds.items(), strict=True):
        for place, (way, values) in enumerate(ways.items()):
            axes.bar(place, median(values), width=0.7, color=COLOURS.get(way, OTHER))
            axes.plot([place] * len(values), values, "o", color="#1a202c", markersize=3, alpha=0.6)
        axes.set_xticks(range(len(ways)), [way.replace("rollart, padded", "padded") for way in ways], fontsize=8)
        axes.set_title(comparison, fontsize=8, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("trained tokens a second", fontsize=8)
    return figure


BENCHMARK = Benchmark("training_step", "a training step beside TRL's: trained tokens a second, padding, memory, ranks", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
