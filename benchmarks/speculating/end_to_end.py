"""Two short runs of SmolLM2 that differ by the draft alone: seconds a step, and which share of them was rollout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.speculating.questions import CONFIG, SYSTEM
from rollart.dashboard.summary import Summary, summarize_run
from rollart.rollout.tables import score_table

NEW_TOKENS, LENGTH = 64, 192
"""Tokens of a response at most, and of a sequence: room for steps of thought."""


def config(draft: Mapping[str, Any], alpha: int, steps: int, groups: int) -> dict[str, Any]:
    """SmolLM2's configuration with longer answers at temperature 1, and `draft` as its `engine.speculation`."""
    found: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    for task in found["tasks"]:
        task |= {"system": SYSTEM, "max_new_tokens": NEW_TOKENS, "max_tokens": LENGTH - 32, "sampling": {"temperature": 1.0}}
    found["train"] |= {"alpha": alpha, "steps": steps, "groups": groups, "checkpoint_every": steps}
    found["engine"] |= {"max_length": LENGTH, "speculation": dict(draft)}
    found["evaluate"] = {"episodes": 3, "every": 0}
    return found


def train(draft: Mapping[str, Any], alpha: int, steps: int, groups: int, folder: Path, name: str) -> Summary:
    """Trains in a process of its own, as a user would; CalledProcessError if that fails."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config(draft, alpha, steps, groups)))
    sets = {"run.root": folder, "run.name": name, "run.dashboard_port": 0}
    program = [str(Path(sys.executable).with_name("rollart")), "run", "train", "--config", str(path)]
    overrides = [part for field, value in sets.items() for part in ("--set", f"{field}={value}")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*program, *overrides], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    return summarize_run(str(folder / name), None, score_table(str(folder / name)))


def observation(summary: Summary) -> dict[str, float]:
    """Seconds of a step, and the share of them in which responses were sampled."""
    use = summary.usage
    return {"seconds_a_step": use.loop / max(summary.steps, 1), "rollout_share": use.shares.get("rollout", 0.0)}


def bound(share: float, speedup: float) -> float:
    """What a `speedup` of the `share` of a step in which responses are sampled is worth at most (Amdahl's law)."""
    return 1.0 / (1.0 - share + share / speedup)
