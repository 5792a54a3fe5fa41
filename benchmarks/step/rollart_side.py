"""This project's side: `Learner.train_step` on a batch that is ready, alone or as one of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
import transformers

from benchmarks.step.batches import Drawn, draw_batch
from benchmarks.step.sides import Case, Meter
from rollart.training.batch_share import train_share
from rollart.training.learner import Learner
from rollart.training.microbatch import micro_batches
from rollart.training.process_group import ProcessRanks
from rollart.training.ranks import ALONE, Ranks
from rollart.training.settings import LearnerSettings
from rollart.types import Receipt, Trajectory

__all__ = ["serve_rank", "serve_rollart"]


def serve_rollart(case: Case, pipe: Connection, ranks: Ranks = ALONE) -> None:
    """Steps on this rank's share of one batch again and again; sends what the meter says, the share of padding in what is forwarded,
    and the gradient's norm before clipping."""
    transformers.logging.disable_progress_bar()
    settings = LearnerSettings.model_validate(case.settings)
    drawn = draw_batch(case.shape, case.vocabulary)
    learner = Learner(case.folder, settings)
    learner.ranks = ranks
    trajectories = drawn.trajectories(sampled_by(learner, drawn))
    pipe.send({})
    for step in range(case.steps):
        batch = train_share(drawn.batch(trajectories, step), settings, reader(trajectories), ranks)
        pipe.recv()
        meter = Meter(trim=case.trim)
        metrics = learner.train_step(batch)
        pipe.send(meter.read() | {"padding_share": metrics.padding_share, "grad_norm": metrics.grad_norm})


def serve_rank(case: Case, pipe: Connection, port: int, rank: int, count: int) -> None:
    """Rank `rank` of `count` in the process group at the store of `port`."""
    serve_rollart(case, pipe, ProcessRanks.join("127.0.0.1", port, 0, rank, count, device="cpu", timeout_s=120))


@torch.no_grad()
def sampled_by(learner: Learner, drawn: Drawn) -> list[list[float]]:
    """Log-probabilities of the completions, as if the learner's policy had sampled them."""
    trajectories = drawn.trajectories()
    settings = learner.settings.batch
    batch = train_share(drawn.batch(trajectories, 0), learner.settings, reader(trajectories), ALONE)
    found: dict[int, list[float]] = {}
    for micro in micro_batches(batch.sequences, settings, packed=learner.policy.packs):
        micro = micro.to(learner.policy.device, learner.policy.compute_dtype)
        chosen = learner.policy.logprobs(micro)[0]
        found |= {member: part.tolist() for member, part in zip(micro.members, chosen.split(micro.counts), strict=True)}
    return [found[i] for i in range(len(found))]


def reader(trajectories: Sequence[Trajectory]) -> Callable[[Sequence[Receipt]], list[Trajectory]]:
    def read(receipts: Sequence[Receipt]) -> list[Trajectory]:
        return [trajectories[receipt.row] for receipt in receipts]

    return read
