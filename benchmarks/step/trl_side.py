"""TRL's side: the training step of its GRPOTrainer on inputs that it has prepared itself, in its own loop. Imported where TRL is."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.step.batches import Drawn, draw_batch
from benchmarks.step.sides import LR, Case, Meter

__all__ = ["serve"]


class Trainer(GRPOTrainer):
    """Prepares its inputs once, by its own code and from the completions that its rollout function returns, and keeps them."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self._buffered_inputs is None:
            return super()._prepare_inputs(generation_batch)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    @property
    def padding_share(self) -> float:
        """Of the positions that are forwarded."""
        masks = [torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1) for part in self._buffered_inputs or []]
        return 1.0 - sum(int(m.sum()) for m in masks) / sum(m.numel() for m in masks)


class Steps(TrainerCallback):
    """Begins a step when it is asked to, and tells what it cost: from after its data has come to after the optimiser's update."""

    def __init__(self, pipe: Connection, *, trim: bool) -> None:
        self._pipe, self._trim = pipe, trim
        self.trainer: Trainer | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._pipe.recv()
        self._meter = Meter(trim=self._trim)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._read = self._meter.read()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "grad_norm" not in logs or self.trainer is None:
            return
        self._pipe.send(self._read | {"grad_norm": logs["grad_norm"], "padding_share": self.trainer.padding_share})


def configuration(case: Case, folder: str) -> GRPOConfig:
    """What a user would give on a CPU, all else at its default; no pass for old log-probabilities, none for a reference."""
    batch = case.shape.sequences
    return GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        per_device_train_batch_size=batch // case.passes, gradient_accumulation_steps=case.passes, num_generations=case.shape.members,
        max_completion_length=case.shape.completion[1], max_steps=case.steps, shuffle_dataset=False, learning_rate=LR,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, gradient_checkpointing=False, beta=0.0, dataloader_pin_memory=False,
    )  # fmt: skip


def trainer_of(case: Case, drawn: Drawn, folder: str, steps: Steps) -> Trainer:
    """The trainer; its dataset's prompts are the numbers of the groups, which the rollout function looks up."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        seen: dict[str, int] = {}
        rows = []
        for prompt in prompts:
            rows.append(int(prompt) * drawn.members + seen.get(prompt, 0))
            seen[prompt] = seen.get(prompt, 0) + 1
        return {
            "prompt_ids": [drawn.prompts[r] for r in rows], "completion_ids": [drawn.completions[r] for r in rows],
            "logprobs": [[0.0] * len(drawn.completions[r]) for r in rows], "score": [drawn.scores[r] for r in rows],
        }  # fmt: skip

    def reward(score: list[float], **_: Any) -> list[float]:
        return score

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(case.folder, dtype=getattr(torch, case.dtype)), reward_funcs=reward,
        args=configuration(case, folder), train_dataset=Dataset.from_list([{"prompt": str(group)} for group in range(case.shape.groups)]),
        processing_class=AutoTokenizer.from_pretrained(case.folder, padding_side="left"), callbacks=[steps], rollout_func=rollout,
    )  # fmt: skip
    steps.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    return trainer


def serve(case: Case, pipe: Connection) -> None:
    """Steps on one batch again and again; sends what the other side sends."""
    warnings.simplefilter("ignore", FutureWarning)  # its own use of what transformers renames
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns of every rollout function that is given
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(case.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, draw_batch(case.shape, case.vocabulary), folder, Steps(pipe, trim=case.trim))
        pipe.send({})
        trainer.train()
