"""Both trainers as the commands that a user would type, each in processes of its own, and the curves that they leave."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reward.task import ROLLART, Plan, sums
from rollart.dashboard.metrics import read_metrics

OURS, THEIRS = "rollart", "TRL"

Curve = list[list[float]]
"""For each step, seconds since training began and the mean reward of the completions that it was trained on."""


@dataclass(frozen=True, slots=True)
class Side:
    """`command(plan, root)` trains once it is run, leaving its files under `root`; `curve(plan, root)` reads from these how it went."""

    command: Callable[[Plan, Path], list[str]]
    curve: Callable[[Plan, Path], Curve]


def configuration(plan: Plan, root: Path) -> dict[str, Any]:
    """The quick start's, with the plan's policy and hyperparameters; no evaluation and no checkpoint between the steps, as TRL makes none."""
    config = sums(plan)
    length = config["tasks"][0]["max_tokens"] + plan.max_new_tokens
    config["run"] = {"root": str(root), "name": plan.name, "seed": plan.seed, "dashboard_port": 0}
    config["policy"] = {"model": plan.folder}
    config["tasks"][0] |= {"group_size": plan.group_size, "max_new_tokens": plan.max_new_tokens, "max_tokens": length}
    config["train"] = {"steps": plan.steps, "groups": plan.groups, "alpha": 1, "checkpoint_every": plan.steps + 1}
    config["training"] = {
        "model": {"dtype": plan.dtype},
        "optimiser": {"lr": plan.lr, "betas": list(plan.betas)},
        "loss": {"name": "decoupled_ppo", "clip_low": plan.clip, "clip_high": plan.clip},
        "batch": {"token_budget": plan.token_budget, "denominator": "trajectory"},
    }
    config["engine"] |= {"slots": min(plan.batch, config["engine"]["slots"]), "max_length": length, "dtype": plan.dtype}
    config["evaluate"] = {"episodes": 1, "every": 0}
    return config


def rollart_command(plan: Plan, root: Path) -> list[str]:
    """`rollart run train` on the plan, whose configuration this writes under `root`."""
    path = root / f"{plan.name}.yaml"
    path.write_text(yaml.safe_dump(configuration(plan, root)))
    return [ROLLART, "run", "train", "--quiet", "--config", str(path)]


def rollart_curve(plan: Plan, root: Path) -> Curve:
    """From the run's metrics. Training begins when the first batch begins to be waited for, with nothing in flight; a step ends when it is
    committed."""
    lines = read_metrics(str(root / plan.name))
    steps = [line for line in lines if line["kind"] == "step"]
    trained = [start for line in lines if line["kind"] == "intervals" for name, start, _ in line["intervals"] if name == "train"]
    begun = min(trained) - steps[0]["seconds"]["wait"]
    return [[step["time"] - begun, next(iter(step["reward"].values()))] for step in steps]


def trl_command(plan: Plan, root: Path) -> list[str]:
    """TRL's GRPOTrainer, see `trl_side`."""
    return [sys.executable, "-m", "benchmarks.reward.trl_side", json.dumps(asdict(plan)), str(_told(plan, root))]


def trl_curve(plan: Plan, root: Path) -> Curve:
    """What `trl_side` told. Training begins where its trainer says so, and a step ends when its metrics are logged."""
    return [json.loads(line) for line in _told(plan, root).read_text().splitlines()]


def _told(plan: Plan, root: Path) -> Path:
    return root / f"trl-{plan.name}.jsonl"


SIDES = {OURS: Side(rollart_command, rollart_curve), THEIRS: Side(trl_command, trl_curve)}
