"""What the quick start learns: reward on held-out episodes before and after, by task, over seeds."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from rollart.dashboard.summary import Summary, summarize_run
from rollart.rollout.tables import score_table

CONFIG = Path(__file__).parents[1] / "flows" / "configs" / "quickstart.yaml"
QUICK = ("train.steps=12", "warm_up.steps=100", "evaluate.episodes=100", "evaluate.every=0")


def train(seed: int, overrides: Sequence[str], root: Path) -> tuple[Summary, float]:
    """The quick start with that seed, in a process of its own as a user would run it: its summary, and its seconds."""
    name = f"seed{seed}"
    sets = [f"run.seed={seed}", f"run.root={root}", f"run.name={name}", "run.dashboard_port=0", *overrides]
    program = [str(Path(sys.executable).with_name("rollart")), "run", "train", "--config", str(CONFIG)]
    begun = time.monotonic()
    subprocess.run([*program, *(part for s in sets for part in ("--set", s))], check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - begun
    url = str(root / name)
    return summarize_run(url, None, score_table(url)), seconds


def rows_of(seed: int, summary: Summary, seconds: float) -> list[dict[str, Any]]:
    """One row a task. `rise` is after minus before on the same held-out episodes, `rise_low` the lower end of its 95 % interval."""
    rows = []
    for task in summary.tasks:
        rise = task.rise
        if rise is None:
            raise ValueError(f"{task.task} was measured only once; a rise needs two evaluations")
        rows.append(
            {
                "way": task.task,
                "seed": seed,
                "episodes": task.after.estimate.n,
                "before": task.before.estimate.mean,
                "after": task.after.estimate.mean,
                "rise": rise.mean,
                "rise_low": rise.low,
                "final_over_best": task.final_over_best or 0.0,
                "seconds": seconds,
                "peak_gb": (summary.peak_memory or 0) / 1e9,
                "rate_ratio": summary.usage.rate_ratio or 0.0,
                "trainer_idle_share": summary.usage.trainer_idle_share or 0.0,
            }
        )
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The worst of all seeds and tasks."""
    return {
        "smallest_rise": min(r["rise"] for r in rows),
        "smallest_rise_low": min(r["rise_low"] for r in rows),
        "smallest_final_over_best": min(r["final_over_best"] for r in rows),
        "longest_seconds": max(r["seconds"] for r in rows),
        "peak_gb": max(r["peak_gb"] for r in rows),
    }


def measure(quick: bool) -> Outcome:
    """Three seeds, one after the other; quick: one seed, cut short, which shows that it runs and not what it learns."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rollart-learning-") as folder:
        for seed in range(1 if quick else 3):
            summary, seconds = train(seed, QUICK if quick else (), Path(folder))
            rows += rows_of(seed, summary, seconds)
    return Outcome(rows, headline(rows))


def draw(outcome: Outcome) -> Figure:
    """A pair of bars, before and after, for each task and seed."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    at = np.arange(len(outcome.rows))
    axes.bar(at - 0.2, [r["before"] for r in outcome.rows], 0.4, label="before", color="#b8c4d6")
    axes.bar(at + 0.2, [r["after"] for r in outcome.rows], 0.4, label="after", color="#2f6db3")
    axes.set_xticks(at, [f"{r['way']}\nseed {r['seed']}" for r in outcome.rows], rotation=45, ha="right", fontsize=8)
    axes.set_ylabel("reward on held-out episodes")
    axes.set_ylim(0, 1)
    axes.legend()
    return figure


BENCHMARK = Benchmark("learning", "one policy learns three tasks in minutes on a laptop's cores", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
