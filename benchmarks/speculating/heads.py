"""A draft head for the benchmark's policy, trained on what was sampled before; uses what `rollart draft` uses, on texts that are in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from rollart.drafts.head import DraftHead
from rollart.drafts.vocabulary import frequent_tokens
from rollart.training.draft_texts import sampled_counts, sequences
from rollart.training.draft_trainer import DraftTrainer, fresh_head
from rollart.training.microbatch import micro_batches
from rollart.training.policy import Policy, load_model
from rollart.training.settings import BatchSettings, DraftSettings, ModelSettings, OptimiserSettings
from rollart.types import Attempt, Episode, SamplingTransform, Segment, Trajectory

__all__ = ["head_of", "trajectories_of"]

Texts = Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]

BATCH = 24
"""Trajectories of a step."""


def trajectories_of(texts: Texts) -> list[Trajectory]:
    """Tasks, prompts and responses as trajectories; how likely each token was plays no part here."""
    found = []
    for index, (task, prompt, response) in enumerate(texts):
        segment = Segment(SamplingTransform())
        segment.append_prompt(prompt)
        segment.append_response(response, [0.0] * len(response), [0] * len(response), "stop")
        found.append(Trajectory(Attempt(Episode(task, index), 0), f"{index}", 0, 0, [segment], "terminated"))
    return found


def head_of(folder: Path, texts: Texts, kept: int, epochs: int, ends: frozenset[int]) -> tuple[DraftHead, tuple[float, ...]]:
    """A head over the `kept` tokens sampled most often, after so many epochs, and its mean chance of acceptance by token in the last of them."""
    played = trajectories_of(texts)
    steps = epochs * -(-len(played) // BATCH)
    settings = DraftSettings(kept=kept, steps=3, optimiser=OptimiserSettings(lr=1e-3, warmup_steps=4, decay="cosine", total_steps=steps))
    policy = Policy(load_model(folder, ModelSettings(dtype="bfloat16")), packing=True)
    counts = sampled_counts(played, len(policy.output_weight))
    trainer = DraftTrainer(policy, fresh_head(policy, settings, seed=0, kept=frequent_tokens(counts, kept, ends)), settings)
    rng = random.Random(0)
    acceptance: tuple[float, ...] = ()
    for _ in range(epochs):
        rng.shuffle(played)
        for at in range(0, len(played), BATCH):
            for micro in micro_batches(sequences(played[at : at + BATCH]), BatchSettings(token_budget=1024), packed=policy.packs):
                here = micro.to(policy.device, policy.compute_dtype)
                with torch.no_grad():
                    states = policy.score(here, states=True).states
                if states is not None:
                    trainer.learn(here, states)
            told = trainer.update()
            acceptance = told.acceptance if told is not None else acceptance
    return trainer.head, acceptance
