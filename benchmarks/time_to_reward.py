"""How long the whole system takes to a set reward beside TRL's GRPOTrainer, and how much memory, on the same task from the same policy.

Reward is the mean over the last `WINDOW` completions that were trained on, at the end of the step that trained on the last of them;
seconds count from the start of training, without imports, cluster and warm-up. Both sides have all cores of the machine.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from benchmarks.reward.sides import OURS, SIDES, THEIRS, Curve
from benchmarks.reward.task import Plan, smollm2, warmed_up
from benchmarks.reward.watched import watched

WINDOW = 1024
"""Completions: four steps' worth, so that the mean is known to 0.02."""

TARGET = 0.6
STEPS = 80
SEEDS = 3
QUICK_WARM_UP = ("warm_up.steps=60", "warm_up.episodes.frozen_lake=40", "warm_up.episodes.guess_number=40", "warm_up.episodes.chain_sum=400")


def running(rewards: Sequence[float], window: int) -> list[float | None]:
    """Mean of each reward and the `window` - 1 before it; None where there are not as many."""
    return [sum(rewards[i - window + 1 : i + 1]) / window if i + 1 >= window else None for i in range(len(rewards))]


def row_of(way: str, plan: Plan, curve: Curve) -> dict[str, Any]:
    """One run, whose `curve` holds seconds, mean reward of the step, and running mean. Where that fell short of the target, `reached` is 0
    and `seconds_to_reward` are those of the whole run."""
    means = running([reward for _, reward in curve], WINDOW // plan.batch)
    at = next((i for i, mean in enumerate(means) if mean is not None and mean >= TARGET), None)
    end = len(curve) - 1 if at is None else at
    return {
        "way": way,
        "seed": plan.seed,
        "seconds_to_reward": curve[end][0],
        "steps_to_reward": float(end + 1),
        "reached": float(at is not None),
        "seconds_a_step": curve[-1][0] / len(curve),
        "last_reward": means[-1] or 0.0,
        "curve": [[seconds, reward, mean] for (seconds, reward), mean in zip(curve, means, strict=True)],
    }


def measure(quick: bool) -> Outcome:
    """Three seeds, the two sides in turns, then SmolLM2; quick: one seed, cut short, which shows that it runs, and no SmolLM2."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="rollart-time-to-reward-") as folder:
        root = Path(folder)
        policy = warmed_up(root, QUICK_WARM_UP if quick else ())
        for seed in range(1 if quick else SEEDS):
            plan = Plan(str(policy), seed, steps=6 if quick else STEPS)
            for way in (OURS, THEIRS)[:: 1 if seed % 2 else -1]:
                subprocess.run(SIDES[way].command(plan, root), check=True, stdout=subprocess.DEVNULL)
                rows.append(row_of(way, plan, SIDES[way].curve(plan, root)))
        larger = {} if quick else on_smollm2(root / "smollm2")
    return Outcome(rows, {**headline(rows), **larger})


def on_smollm2(root: Path) -> dict[str, float]:
    """Peak memory of each side on SmolLM2-135M in bfloat16, all its processes together from their start to their end, and seconds of a step
    after the first: 4 prompts of 8 completions of up to 48 tokens, here in passes of 512 tokens."""
    plan = Plan(str(smollm2(root / "model")), seed=0, steps=4, groups=4, lr=1e-6, max_new_tokens=48, dtype="bfloat16", shown="", token_budget=512)
    peaks, seconds = {}, {}
    for way, side in SIDES.items():
        peaks[way] = watched(side.command(plan, root))
        curve = side.curve(plan, root)
        seconds[way] = (curve[-1][0] - curve[0][0]) / (len(curve) - 1)
    found = {f"smollm2_peak_gb_{way}": peak / 1e9 for way, peak in peaks.items()}
    return {
        "peak_memory_ratio": peaks[OURS] / peaks[THEIRS],
        "smollm2_step_time_ratio": seconds[OURS] / seconds[THEIRS],
        **found,
        **{f"smollm2_seconds_a_step_{way}": value for way, value in seconds.items()},
    }


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Ours over TRL's, of the medians over the seeds."""

    def ratio(figure: str) -> float:
        ours, theirs = (median(row[figure] for row in rows if row["way"] == way) for way in (OURS, THEIRS))
        return ours / theirs

    return {
        "time_ratio": ratio("seconds_to_reward"),
        "steps_ratio": ratio("steps_to_reward"),
        "step_time_ratio": ratio("seconds_a_step"),
        "reached_share": sum(row["reached"] for row in rows) / len(rows),
    }


def draw(outcome: Outcome) -> Figure:
    """Running mean of reward over seconds, a line a run."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    labels = {OURS: OURS, THEIRS: THEIRS}
    for row in outcome.rows:
        points = [(seconds, mean) for seconds, _, mean in row["curve"] if mean is not None]
        colour = "#2b6cb0" if row["way"] == OURS else "#c05621"
        axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=labels.pop(row["way"], None), linewidth=1)
    axes.axhline(TARGET, color="#718096", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"reward, mean of {WINDOW:,} completions")
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))
    return figure


BENCHMARK = Benchmark("time_to_reward", "Seconds to a set reward, the whole system beside TRL's GRPOTrainer", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
