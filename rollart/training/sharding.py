"""A policy spread over ranks by torch's FSDP2: each keeps a part of every tensor and has the whole of a layer while it computes there.

Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), stage 3. Owns where the cuts lie; reads no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rollart.training.policy import Policy
from rollart.training.state import own_tensors
from storage.arrays.distributed_tensors import shard_of

if TYPE_CHECKING:
    from rollart.training.learner import Learner

__all__ = ["cuts", "mesh_of", "shard"]

T = TypeVar("T")


def mesh_of(device: torch.device, count: int) -> DeviceMesh:
    """The ranks of the present process group, in one row."""
    return init_device_mesh(device.type, (count,))


def shard(policy: Policy, mesh: DeviceMesh) -> None:
    """Spreads the policy's model over `mesh`, in place: its layers one by one, and the rest, where output and embedding may be one tensor,
    together. Gradients are summed over the ranks, in float32 where the model is in bfloat16."""
    model: Any = policy.model
    sums = MixedPrecisionPolicy(reduce_dtype=policy.compute_dtype)
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=sums)
    # (Left whole after a pass, the root would keep weights from before the next optimiser step.)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=sums)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    # The policy asks the body and the output layer, not the model; this is what makes their tensors whole around that.
    model.within = MethodType(_within, model)
    register_fsdp_forward_method(model, "within")
    policy.within = model.within


def _within(model: nn.Module, work: Callable[..., T], *args: Any, **options: Any) -> T:
    return work(*args, **options)


def cuts(learner: Learner, names: Iterable[str]) -> dict[str, tuple[slice, ...]]:
    """What this rank has of the arrays `names` of a learner's state, of those that are spread."""
    held = {f"weights/{name}": value for name, value in own_tensors(learner.policy.model).items()}
    if learner.reference is not None:
        held |= {f"reference/{name}": value for name, value in own_tensors(learner.reference.model).items()}
    for name, parameter in learner.optimiser.parameters.items():
        held |= {f"optimiser/{field}/{name}": parameter for field in ("exp_avg", "exp_avg_sq", "master")}
    return {name: _cut(held[name]) for name in names if isinstance(held.get(name), DTensor)}


def _cut(tensor: Any) -> tuple[slice, ...]:
    part = tensor.to_local()
    return tuple(slice(start, start + size) for start, size in zip(shard_of(tensor).start, part.shape, strict=True))
