"""What this process writes of a model that torch has spread over a device mesh; owns the reading of placements, and no bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from storage.arrays import parts
from storage.errors import UnsupportedTensor


def own_part(state: Mapping[str, torch.Tensor], rank: int) -> tuple[dict[str, torch.Tensor], dict[str, parts.Shard]]:
    """The tensors that this rank has to give `publish_part`, and where they lie in the whole ones, of the state dict of a model whose
    parameters are DTensors (FSDP2, tensor parallelism); plain tensors are rank 0's.

    Of replicated values the first replica writes one. UnsupportedTensor names a DTensor that is placed in another way.
    """
    held: dict[str, torch.Tensor] = {}
    shards: dict[str, parts.Shard] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            if rank == 0:
                held[name] = tensor
            continue
        shard = shard_of(tensor, name)
        if _is_first_replica(tensor):
            held[name] = tensor.to_local()
            shards[name] = shard
    return held, shards


def shard_of(tensor: DTensor, name: str = "") -> parts.Shard:
    """Where this process's part of `tensor` lies in it. UnsupportedTensor, with `name`, for placements other than shards and replicas."""
    if any(not isinstance(placement, Replicate | Shard) for placement in tensor.placements):
        raise UnsupportedTensor(f"tensor {name!r} can't be stored as it is placed, {tensor.placements}: redistribute it into shards or replicas")
    _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # (An empty part is said to start at the end, or past it.)
    return parts.Shard(tuple(min(at, size) for at, size in zip(start, tensor.shape, strict=True)), tuple(tensor.shape))


def _is_first_replica(tensor: DTensor) -> bool:
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    return all(not isinstance(placement, Replicate) or at == 0 for placement, at in zip(tensor.placements, place, strict=True))
