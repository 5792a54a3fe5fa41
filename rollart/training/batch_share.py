"""A share of a batch or of supervised play, read by receipt and built: what a rank trains on. Knows no store and no model."""

from __future__ import annotations

from collections.abc import Sequence

from rollart.training.advantages.registry import advantages_of
from rollart.training.batch import TrainBatch, build_batch
from rollart.training.errors import BatchError
from rollart.training.ranks import Place
from rollart.training.settings import LearnerSettings
from rollart.training.shares import TrajectoryReader, shares, spread
from rollart.types import Batch, Receipt, Segment

__all__ = ["segments_share", "train_share"]


def train_share(batch: Batch, settings: LearnerSettings, read: TrajectoryReader, place: Place) -> TrainBatch:
    """The part of `batch` at `place`; its trajectories keep their numbers in the whole of it.

    BatchError if a trajectory is not the one that its receipt names; TransformError as `build_batch` has it.
    """
    advantages = advantages_of(batch.groups, settings.advantage)  # scores are here, all of them
    share = shares(batch.members, place.count, settings.batch.minibatches)[place.rank]
    trajectories = read([member.receipt for _, member in share])
    for (_, member), trajectory in zip(share, trajectories, strict=True):
        if (trajectory.attempt, trajectory.nonce) != (member.receipt.attempt, member.receipt.nonce):
            raise BatchError(f"the trajectory read for {member.receipt.attempt} is {trajectory.attempt}, or another execution of it")
    return build_batch(trajectories, advantages, batch.step, {member.receipt.attempt: number for number, member in share})


def segments_share(receipts: Sequence[Receipt], read: TrajectoryReader, place: Place) -> list[Segment]:
    """The segments of that part, at `place`, of the trajectories that `receipts` name, in their order."""
    mine = spread(receipts, place.count)[place.rank]
    return [segment for trajectory in read([receipts[i] for i in mine]) for segment in trajectory.segments]
