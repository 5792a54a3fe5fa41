"""`python -m benchmarks.reward.trl_side PLAN FILE [GIVEN]`: TRL's GRPOTrainer on a plan, in a process of its own as a user would run it.

Writes one line a step to FILE, JSON: `[seconds since training began, mean reward]`. PLAN is JSON, and so is GIVEN: other fields of
GRPOConfig, to try whether they are faster than those of `configuration`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from typing import Any, TextIO

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.reward.task import TASK, Plan, questions, trainer_seed
from rollart.rewards.reasoning import reasoning
from rollart.types import Attempt, Episode, Trajectory


def configuration(plan: Plan, folder: str, **given: Any) -> GRPOConfig:
    """The settings of a user who wants this plan to be trained fast on a CPU; `given` are others to try.

    A step's completions go through in one pass, without accumulation, and keep their activations. There is no reference policy to ask
    (`beta` 0), one optimiser step a batch, and no ratio to an earlier policy. `loss_type` grpo weighs every trajectory the same.
    """
    return GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        per_device_train_batch_size=plan.batch, num_generations=plan.group_size, max_steps=plan.steps, shuffle_dataset=False,
        max_completion_length=plan.max_new_tokens, temperature=1.0, beta=0.0, epsilon=plan.clip, loss_type="grpo", seed=trainer_seed(plan),
        learning_rate=plan.lr, lr_scheduler_type="constant", adam_beta1=plan.betas[0], adam_beta2=plan.betas[1], weight_decay=0.0,
        max_grad_norm=1.0, gradient_checkpointing=False, dataloader_pin_memory=False, **given,
    )  # fmt: skip


class Told(TrainerCallback):
    """Tells of each step as it ends: seconds since training began, and the mean reward of the completions that it was trained on."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.begun = out, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is not None and "reward" in logs:
            print(json.dumps([time.monotonic() - self.begun, float(logs["reward"])]), file=self.out, flush=True)


def train(plan: Plan, out: TextIO, **given: Any) -> None:
    """Trains as the plan says, telling of it on `out`; `given` are other fields of GRPOConfig."""
    settings, asked = questions(plan)
    rows = [{"prompt": prompt, "entry": json.dumps(entry)} for prompt, entry in asked]

    def score(completions: list[str], entry: list[str], **_: Any) -> list[float]:
        found = []
        for text, spelled in zip(completions, entry, strict=True):
            info = {"family": settings.family, "config": settings.config, "entry": json.loads(spelled), "action": text}
            found.append(reasoning(Trajectory(Attempt(Episode(TASK, 0, "train"), 0), "", 0, 0, [], "terminated", info)).value)
        return found

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(plan.folder, dtype=getattr(torch, plan.dtype)), reward_funcs=score,
            args=configuration(plan, folder, **given), train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(plan.folder, padding_side="left"), callbacks=[Told(out)],
        )  # fmt: skip
        trainer.train()


def main() -> None:
    """Trains as the arguments say, with a torch thread for each core that the process may use."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    plan, file, *given = sys.argv[1:]
    with open(file, "w") as out:
        train(Plan(**json.loads(plan)), out, **json.loads(given[0] if given else "{}"))


if __name__ == "__main__":
    main()
