"""Whatever a state looks like, it comes back as it was, whole or in part, however it is published and pulled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.arrays.packing import byte_view, pack
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.tensors import cuts, plain, same, states, tensors

ANY_STATE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CHUNKS = st.sampled_from([16, 100, 1 << 20])


@pytest.fixture
def store(tmp_path_factory, monkeypatch):
    def opened(chunk_bytes: int) -> WeightStore:
        monkeypatch.setattr("storage.weights.pack", lambda state, **more: pack(state, chunk_bytes=chunk_bytes, **more))
        return WeightStore(str(tmp_path_factory.mktemp("state")))

    return opened


@ANY_STATE
@given(state=states(), chunk_bytes=CHUNKS, step=st.integers(0, 10**9), background=st.booleans())
def test_any_state_comes_back_bit_for_bit_and_as_tied_as_it_was(store, state, chunk_bytes, step, background):
    weights = store(chunk_bytes)
    weights.publish(state, step=step, background=background).result(60)
    pulled = weights.pull()
    assert list(pulled) == list(state)
    for name, tensor in state.items():
        assert same(pulled[name], tensor)
        assert same(weights.pull(names=[name])[name], tensor)
        for other in state:
            if tensor is state[other] and tensor.numel():
                assert pulled[name] is pulled[other]


@ANY_STATE
@given(state=states(), chunk_bytes=CHUNKS, data=st.data())
def test_any_slices_of_any_tensors_are_what_cutting_the_tensors_gives(store, state, chunk_bytes, data):
    weights = store(chunk_bytes)
    weights.publish(state, step=0, background=False)
    slices = {name: data.draw(cuts(tuple(tensor.shape))) for name, tensor in state.items()}
    pulled = weights.pull(slices=slices)
    for name, tensor in state.items():
        assert same(pulled[name], tensor[slices[name]])


@ANY_STATE
@given(state=states(), chunk_bytes=CHUNKS, data=st.data())
def test_any_slices_are_read_into_tensors_of_any_strides(store, state, chunk_bytes, data):
    weights = store(chunk_bytes)
    weights.publish(state, step=0, background=False)
    slices = {name: data.draw(cuts(tuple(tensor.shape))) for name, tensor in state.items() if data.draw(st.booleans())}
    wanted = {name: tensor[slices.get(name, ...)] for name, tensor in state.items()}
    out = {name: _room_for(tensor, data.draw(st.integers(0, 2))) for name, tensor in wanted.items() if data.draw(st.booleans())}
    around = {name: (base, base.clone()) for name, (base, _) in out.items()}
    pulled = weights.pull(slices=slices, out={name: view for name, (_, view) in out.items()})
    for name, tensor in wanted.items():
        assert same(pulled[name], tensor)
    for name, (base, view) in out.items():
        assert pulled[name] is view
        view.zero_()
        assert same(base, around[name][1]), "something beside the view was written"


def _room_for(tensor: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros in a larger memory, and a view in them with the tensor's shape: plain, in steps of two, or transposed."""
    shape = tuple(tensor.shape)
    if not shape or not kind:
        base = torch.zeros(tensor.numel() + 2, dtype=tensor.dtype)
        return base, base[1 : 1 + tensor.numel()].view(shape)
    if kind == 1:
        base = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=tensor.dtype)
        return base, base[..., ::2]
    base = torch.zeros(shape[::-1], dtype=tensor.dtype)
    return base, base.permute(*reversed(range(len(shape))))


@ANY_STATE
@given(tensor=tensors(), chunk_bytes=CHUNKS)
def test_a_snapshot_keeps_any_tensor_and_the_foreground_needs_none(tensor, chunk_bytes):
    for copy in (True, False):
        packed = pack({"x": tensor}, chunk_bytes=chunk_bytes, copy=copy)
        for array in packed.arrays.values():
            held = b"".join(part.tobytes() for number in range(-(-array.length // array.chunk)) for part in array.chunk_parts(number))
            assert held == byte_view(plain(tensor)).tobytes()


def test_versions_are_names_not_only_small_numbers(tmp_path):
    weights = WeightStore(str(tmp_path))
    weights.publish({"w": torch.ones(2)}, version=Version(3, 10**9), background=False)
    assert weights.publish({"w": torch.ones(2)}, step=10**9 + 1, background=False).version == Version(3, 10**9 + 1)
