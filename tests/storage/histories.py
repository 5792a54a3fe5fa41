"""States, versions of them as training makes them, and ways to publish and to spoil them, for the tests of deltas."""

from __future__ import annotations

import numpy as np
import torch

from storage.arrays.packing import byte_view
from storage.format import layout
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.tensors import of_bits, same

State = dict[str, torch.Tensor]


def v(step: int) -> Version:
    return Version(0, step)


def all_same(found: State, wanted: State) -> bool:
    return list(found) == list(wanted) and all(same(found[name], wanted[name]) for name in wanted)


def updated(state: State, seed: int, share: float) -> State:
    """The state with a share of the values of each tensor anything else, and ties kept."""
    generator = np.random.default_rng(seed)
    made: dict[int, torch.Tensor] = {}
    for i, tensor in enumerate(state.values()):
        if id(tensor) not in made:
            made[id(tensor)] = tensor.clone()
            if tensor.numel():
                values = byte_view(made[id(tensor)]).reshape(tensor.numel(), -1)
                at = generator.random(tensor.numel()) < share
                values[at] = byte_view(of_bits(tensor.dtype, *tensor.shape, seed=seed + i)).reshape(values.shape)[at]
    return {name: made[id(tensor)] for name, tensor in state.items()}


def model(seed: int = 0, rows: int = 1500) -> State:
    """Two types, a tie, a scalar and an empty tensor; over two segments of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(rows, 512, generator=generator).bfloat16()
    state = {"embed": embed, "norm": torch.randn(512, generator=generator).bfloat16(), "head": embed, "scale": torch.tensor(0.5).bfloat16()}
    state |= {
        "w": torch.randn(rows, 400, generator=generator).bfloat16(),
        "none": torch.empty(0, 3),
        "bias": torch.randn(70_000, generator=generator),
    }
    return state


def stepped(state: State, seed: int, share: float = 0.01) -> State:
    """As after a training step: a share of the values moved a little, ties kept."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in made:
            moved = torch.rand(tensor.shape, generator=generator) < share
            made[id(tensor)] = torch.where(moved, tensor * 1.01, tensor)
    return {name: made[id(tensor)] for name, tensor in state.items()}


def copies(state: State) -> State:
    made = {id(tensor): tensor.clone() for tensor in state.values()}
    return {name: made[id(tensor)] for name, tensor in state.items()}


def history(count: int) -> list[State]:
    states = [model()]
    for seed in range(1, count):
        states.append(stepped(states[-1], seed))
    return states


def publish(weights: WeightStore, states: list[State], first: int = 0) -> None:
    for step, state in enumerate(states, first):
        weights.publish(state, version=v(step)).result(60)


def data_paths(weights: WeightStore, step: int) -> list[str]:
    """Chunks of a version."""
    commit = weights.commit(v(step))
    prefix = layout.data_prefix(commit.version, commit.attempt)
    return [f"{prefix}/{chunk.key}" for array in commit.arrays.values() for chunk in array.chunks]


def flip(objects: ObjectStore, path: str, at: int) -> bytes:
    """Flips a bit of an object; what it held before."""
    before = objects.read(path)
    spoilt = bytearray(before)
    spoilt[at] ^= 1
    objects.write(path, bytes(spoilt))
    return before
