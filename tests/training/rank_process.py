"""One rank of the tests' process group, in a process of its own: trains on every case, among 3 ranks and then among 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rollart.training.batch_share import segments_share, train_share
from rollart.training.learner import Learner
from rollart.training.metrics import StepMetrics
from rollart.training.process_group import ProcessRanks, leave
from rollart.training.ranks import ALONE, Ranks
from rollart.training.settings import LearnerSettings
from rollart.types import Batch, Receipt, Trajectory

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Case:
    """A learner, what it is warmed up with, and the batches that it then trains on; their receipts name rows of `trajectories`."""

    folder: str
    settings: LearnerSettings
    trajectories: list[Trajectory]
    batches: list[Batch]
    supervised: list[Receipt]


@dataclass(frozen=True)
class Found:
    """The gradient of each optimiser step before it was clipped, by parameter, what each training step said, and the weights in the end."""

    gradients: list[dict[str, Numbers]]
    steps: list[StepMetrics]
    losses: list[float]
    weights: dict[str, Numbers]
    read: list[int]


def carry_out(case: Case, ranks: Ranks) -> Found:
    """What comes of a case on this rank, spread tensors made whole."""
    learner = Learner(case.folder, case.settings)
    learner.ranks = ranks
    if case.settings.model.shard and ranks.count > 1:
        learner.shard()
    gradients: list[dict[str, Numbers]] = []
    losses: list[float] = []
    if case.supervised:
        losses.append(learner.supervised_step(segments_share(case.supervised, lambda rs: [case.trajectories[r.row] for r in rs], ranks)).loss)
        learner.begin()
    read: list[int] = []

    def reader(receipts: Sequence[Receipt]) -> list[Trajectory]:
        read.extend(r.row for r in receipts)
        return [case.trajectories[r.row] for r in receipts]

    update = learner.optimiser.update

    def noted(loss: torch.Tensor) -> Any:
        gradients.append({name: whole(p.grad) for name, p in learner.optimiser._stepped.items() if p.grad is not None})
        return update(loss)

    learner.optimiser.update = noted  # type: ignore[method-assign]
    steps = [learner.train_step(train_share(batch, case.settings, reader, ranks)) for batch in case.batches]
    return Found(gradients, steps, losses, {name: whole(value) for name, value in learner.weights().items()}, read)


def whole(tensor: Any) -> Numbers:
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().double().numpy().copy()  # torch would send its tensors as files of the process that ends


def main(rank: int, port: int, cases: Mapping[str, Case], results: Connection) -> None:
    """Rank `rank` at the store of `port`: sends what it found, by case and number of ranks."""
    torch.set_num_threads(1)
    found: dict[tuple[str, int], Found] = {}
    for count in (3, 2):
        if rank < count:
            ranks = ProcessRanks.join("127.0.0.1", port, count, rank, count, device="cpu", timeout_s=60)
            for name, case in cases.items():
                found[name, count] = carry_out(case, ranks)
            leave()
    results.send(found)


def alone(case: Case) -> Found:
    """The same case on one rank."""
    return carry_out(case, ALONE)
