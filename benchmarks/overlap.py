"""Training beside rollout (alpha 1) against taking turns (alpha 0): the quick start's run, otherwise the same."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from rollart.dashboard.summary import Summary, summarize_run
from rollart.rollout.tables import score_table

CONFIG = Path(__file__).parents[1] / "flows" / "configs" / "quickstart.yaml"
WAYS = {"taking turns": 0, "side by side": 1}
FIGURES = {"seconds_a_step": "seconds a step", "trainer_idle_share": "trainer idle", "rate_ratio": "tokens/s, training over idle"}

Run = Callable[[int, int, int, Path], Summary]
"""(alpha, steps, seed, folder) -> the summary of a run with them."""


def train(alpha: int, steps: int, seed: int, folder: Path) -> Summary:
    """Trains in a process of its own, as a user would; CalledProcessError if that fails."""
    name = f"alpha{alpha}-seed{seed}"
    sets = {"train.alpha": alpha, "train.steps": steps, "run.seed": seed, "run.root": folder, "run.name": name, "run.dashboard_port": 0}
    sets |= {"evaluate.every": 0, "evaluate.episodes": 1}
    overrides = [part for path, value in sets.items() for part in ("--set", f"{path}={value}")]
    program = [str(Path(sys.executable).with_name("rollart")), "run", "train", "--config", str(CONFIG)]
    subprocess.run([*program, *overrides], check=True, stdout=subprocess.DEVNULL)
    url = str(folder / name)
    return summarize_run(url, None, score_table(url))


def compare(repetitions: int, steps: int, run: Run = train) -> Outcome:
    """Runs the two ways in turns, so that a machine whose load drifts burdens both."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rollart-overlap-") as folder:
        for seed in range(repetitions):
            for way, alpha in WAYS.items():
                rows.append({"way": way, "seed": seed, **observation(run(alpha, steps, seed, Path(folder)))})
    return Outcome(rows, headline(rows))


def observation(summary: Summary) -> dict[str, float]:
    """The figures of one run; a share that could not be measured counts as 0."""
    use = summary.usage
    return {
        "seconds_a_step": use.loop / max(summary.steps, 1),
        "overlap_share": use.overlap_share or 0.0,
        "trainer_idle_share": use.trainer_idle_share or 0.0,
        "tokens_a_second_training": use.rate_while_training or 0.0,
        "tokens_a_second_idle": use.rate_while_idle or 0.0,
        "rate_ratio": use.rate_ratio or 0.0,
    }


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the repetitions; `speedup` is seconds a step taking turns over those side by side."""

    def middle(way: str, figure: str) -> float:
        return median(row[figure] for row in rows if row["way"] == way)

    return {
        "speedup": middle("taking turns", "seconds_a_step") / middle("side by side", "seconds_a_step"),
        "overlap_share": middle("side by side", "overlap_share"),
        "trainer_idle_share": middle("side by side", "trainer_idle_share"),
        "rate_ratio": middle("side by side", "rate_ratio"),
    }


def draw(outcome: Outcome) -> Figure:
    """Each figure for both ways: a dot a run, a bar at the median."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, len(FIGURES)), FIGURES.items(), strict=True):
        for place, way in enumerate(WAYS):
            values = [row[name] for row in outcome.rows if row["way"] == way]
            axes.bar(place, median(values), width=0.6, color=("#a0aec0", "#2b6cb0")[place])
            axes.plot([place] * len(values), values, "o", color="#1a202c", markersize=4, alpha=0.7)
        axes.set_xticks(range(len(WAYS)), list(WAYS))
        axes.set_title(label, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    return figure


def measure(quick: bool) -> Outcome:
    """Two pairs of short runs, or five of longer ones."""
    return compare(2, 12) if quick else compare(5, 40)


BENCHMARK = Benchmark("overlap", "What training beside rollout is worth against taking turns", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
