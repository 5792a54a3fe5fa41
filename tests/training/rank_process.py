"""One rank of the tests' process group, in a process of its own: trains on every case, among 3 ranks and then among 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rollart.training.agreement import Rescored
from rollart.training.batch_share import segments_share, train_share
from rollart.training.learner import Learner
from rollart.training.metrics import StepMetrics
from rollart.training.process_group import ProcessRanks, leave
from rollart.training.ranks import Ranks
from rollart.training.rescoring import rescored
from rollart.training.settings import LearnerSettings
from rollart.training.sharding import cuts
from rollart.types import Batch, Receipt, Trajectory
from storage.arrays.distributed_tensors import own_part
from storage.checkpoints import CheckpointStore
from storage.version import Version
from storage.weights import WeightStore

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Case:
    """A learner, what it is warmed up with, and the batches that it then trains on; their receipts name rows of `trajectories`."""

    folder: str
    settings: LearnerSettings
    trajectories: list[Trajectory]
    batches: list[Batch]
    supervised: list[Receipt]

    def read(self, receipts: Sequence[Receipt]) -> list[Trajectory]:
        return [self.trajectories[r.row] for r in receipts]


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
    learner = learner_of(case, ranks)
    gradients: list[dict[str, Numbers]] = []
    losses: list[float] = []
    if case.supervised:
        losses.append(learner.supervised_step(segments_share(case.supervised, case.read, ranks)).loss)
        learner.begin()
    read: list[int] = []

    def reader(receipts: Sequence[Receipt]) -> list[Trajectory]:
        read.extend(r.row for r in receipts)
        return case.read(receipts)

    update = learner.optimiser.update

    def noted(loss: torch.Tensor) -> Any:
        gradients.append({name: whole(p.grad) for name, p in learner.optimiser._stepped.items() if p.grad is not None})
        return update(loss)

    learner.optimiser.update = noted  # type: ignore[method-assign]
    steps = [learner.train_step(train_share(batch, case.settings, reader, ranks)) for batch in case.batches]
    return Found(gradients, steps, losses, {name: whole(value) for name, value in learner.weights().items()}, read)


def learner_of(case: Case, ranks: Ranks) -> Learner:
    learner = Learner(case.folder, case.settings)
    learner.ranks = ranks
    if case.settings.model.shard and ranks.count > 1:
        learner.shard()
    return learner


def whole(tensor: Any) -> Numbers:
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().double().numpy().copy()  # torch would send its tensors as files of the process that ends


def save(case: Case, ranks: Ranks, attempt: str, url: str) -> None:
    """Takes the first step of a case whose model is spread, and writes this rank's part of the version and of the checkpoint after it."""
    learner = learner_of(case, ranks)
    learner.train_step(train_share(case.batches[0], case.settings, case.read, ranks))
    arrays, document = learner.state()
    checkpoints, weights = CheckpointStore(f"{url}/checkpoints"), WeightStore(f"{url}/weights")
    parts, at = {"attempt": attempt, "rank": ranks.rank, "ranks": ranks.count}, Version(0, 1)
    held, shards = own_part(arrays, ranks.rank)
    checkpoints.save_part(held, version=at, shards=shards, **parts)
    held, shards = own_part(learner.weights(), ranks.rank)
    weights.publish_part(held, version=at, shards=shards, **parts)
    ranks.gather(None)  # all have written
    if ranks.rank == 0:
        checkpoints.commit_parts(at, attempt, ranks.count, documents={"learner": document})
        weights.commit_parts(at, attempt, ranks.count)
    ranks.gather(None)


def go_on(case: Case, ranks: Ranks, url: str) -> dict[str, Numbers]:
    """The weights after the second step of a case, from the checkpoint after the first, of which this rank reads its part alone."""
    learner = learner_of(case, ranks)
    checkpoints = CheckpointStore(f"{url}/checkpoints")
    slices = cuts(learner, checkpoints.commit(Version(0, 1)).tensors)
    found = checkpoints.load(Version(0, 1), slices=slices)
    learner.load_state(found.arrays, found.documents["learner"])
    learner.train_step(train_share(case.batches[1], case.settings, case.read, ranks))
    return {name: whole(value) for name, value in learner.weights().items()}


def ask_again(case: Case, ranks: Ranks, url: str) -> Rescored | None:
    """What is found out of the agreement with the version after the first step, by a learner that has gone on from there."""
    learner = learner_of(case, ranks)
    learner.step = 1
    share = train_share(case.batches[1], case.settings, case.read, ranks)
    learner.train_step(share)
    before = learner.weights()
    stale = replace(share, step=2, sequences=tuple(replace(s, versions=torch.ones_like(s.versions)) for s in share.sequences))
    found = rescored(learner, stale, 0, WeightStore(f"{url}/weights"))
    if any(not np.array_equal(whole(before[name]), whole(value)) for name, value in learner.weights().items()):
        raise AssertionError("the learner's weights are not what they were")
    return found


def take_over(case: Case, ranks: Ranks, url: str) -> dict[str, Numbers]:
    """What the ranks hold together once each has taken its part of the version after the first step."""
    learner = learner_of(case, ranks)
    learner.load_weights(WeightStore(f"{url}/weights").pull(Version(0, 1)), step=1)
    return {name: whole(value) for name, value in learner.weights().items()}


def main(rank: int, port: int, cases: Mapping[str, Case], url: str, attempt: str, results: Connection) -> None:
    """Rank `rank` at the store of `port`: sends what it found, by case and number of ranks, and what came of going on from a checkpoint,
    of taking a version over, and of asking it again."""
    torch.set_num_threads(1)
    found: dict[tuple[str, int], Found] = {}
    for count in (3, 2):
        if rank < count:
            ranks = ProcessRanks.join("127.0.0.1", port, count, rank, count, device="cpu", timeout_s=60)
            for name, case in cases.items():
                found[name, count] = carry_out(case, ranks)
            if count == 2:
                save(cases["sharded"], ranks, attempt, url)
            leave()
    ranks = ProcessRanks.join("127.0.0.1", port, 4, rank, 3, device="cpu", timeout_s=60)
    resumed = go_on(cases["sharded"], ranks, url)
    taken = take_over(cases["sharded"], ranks, url)
    again = [ask_again(cases[name], ranks, url) for name in ("plain", "sharded")]
    leave()
    results.send((found, resumed, taken, again))
