"""What a rank is asked to do, as Dask tasks pinned to its worker: to take its place in a group, to take a step there, to write its part.

Torch is imported in the worker alone, as in `worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from distributed import get_worker
from distributed.comm.addressing import get_address_host

from rollart.training.seat import Invitation, Order, Standing
from rollart.training.worker import learner_plugin, own_document
from storage.version import Version

__all__ = [
    "attempt_task", "checkpoint_part_task", "commit_checkpoint_task", "commit_version_task", "join_task", "open_task", "ordered_task",
    "publish_part_task", "standing_task",
]  # fmt: skip

T = TypeVar("T")


def open_task() -> tuple[str, int]:
    """Opens a store where the ranks of a new group find each other; its host, that of this worker's own address, and its port."""
    host = get_address_host(get_worker().address)
    return host, learner_plugin().seat.open(host)


def standing_task() -> Standing:
    """What this worker has done in a group, once its learner is there."""
    plugin = learner_plugin()
    _ = plugin.learner
    return plugin.seat.standing


def join_task(invitation: Invitation) -> None:
    """Takes this worker's place in a new group. GroupBroken."""
    plugin = learner_plugin()
    if plugin.seat.join(plugin.learner, invitation):
        plugin.forget()


def ordered_task(order: Order, task: Callable[..., T], *args: Any) -> T:
    """Carries out `task`, a step that all ranks take, as `order`; again, it gives what it gave. GroupBroken, and what the task raises."""
    plugin = learner_plugin()
    return plugin.seat.carry_out(order, plugin.learner, lambda: task(*args))


def attempt_task() -> str:
    """A name for what the ranks are about to write together."""
    from storage.arrays.writing import new_attempt

    return new_attempt()


def publish_part_task(version: Version, attempt: str) -> None:
    """Writes what this rank has of the weights of `version`, of a model that is spread over the ranks."""
    from storage.arrays.distributed_tensors import own_part

    plugin = learner_plugin()
    ranks = plugin.learner.ranks
    held, shards = own_part(plugin.snapshot(version), ranks.rank)
    plugin.weights.publish_part(held, version=version, attempt=attempt, rank=ranks.rank, ranks=ranks.count, shards=shards)


def commit_version_task(version: Version, attempt: str, parent: Version | None, metadata: Mapping[str, Any]) -> Version:
    """Makes a version exist, once every rank has written its part."""
    plugin = learner_plugin()
    return plugin.weights.commit_parts(version, attempt, plugin.learner.ranks.count, parent=parent, metadata=metadata, files=plugin.files)


def checkpoint_part_task(version: Version, attempt: str) -> None:
    """Writes what this rank has of the learner's state at `version`."""
    from storage.arrays.distributed_tensors import own_part

    plugin = learner_plugin()
    ranks = plugin.learner.ranks
    arrays, _ = plugin.state(version)
    held, shards = own_part(arrays, ranks.rank)
    plugin.checkpoints.save_part(held, version=version, attempt=attempt, rank=ranks.rank, ranks=ranks.count, shards=shards)


def commit_checkpoint_task(version: Version, attempt: str, documents: Mapping[str, Any]) -> Version:
    """Makes a checkpoint exist, once every rank has written its part."""
    plugin = learner_plugin()
    _, document = plugin.state(version)
    return plugin.checkpoints.commit_parts(version, attempt, plugin.learner.ranks.count, documents=own_document(documents, document))
