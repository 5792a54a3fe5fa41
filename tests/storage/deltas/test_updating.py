from __future__ import annotations

import pytest
import torch

from storage.arrays.packing import byte_view
from storage.errors import Damaged, TensorMismatch, UnknownTensor, VersionMissing
from storage.format import layout
from storage.objects.store import ObjectStore
from tests.storage.histories import all_same, copies, history, publish, v


@pytest.mark.parametrize("held", range(6))
def test_a_pull_from_any_held_version_gives_the_asked_one_in_place(weights, held):
    states = history(6)
    publish(weights, states)
    for wanted in (1, 3, 5):
        out = copies(states[held])
        addresses = {name: tensor.data_ptr() for name, tensor in out.items()}
        found = weights.pull(v(wanted), base=v(held), out=out)
        assert all_same(found, states[wanted])
        assert all(found[name] is out[name] for name in out)
        assert {name: tensor.data_ptr() for name, tensor in out.items()} == addresses


def test_only_the_changes_since_are_read_and_told_of_before(local, monkeypatch):
    states = history(4)
    publish(local, states)
    read: list[str] = []
    read_into = ObjectStore.read_into

    def noted(self, path, buffers, start=0, seen=None):
        read.append(f"{self.url}/{path}")
        return read_into(self, path, buffers, start, seen)

    monkeypatch.setattr(ObjectStore, "read_into", noted)
    local.pull(v(3), base=v(1), out=copies(states[1]))
    assert {part for path in read for part in path.split("/") if part.startswith("v0-")} == {
        layout.data_prefix(v(step), local.commit(v(step)).attempt).split("/")[1] for step in (2, 3)
    }
    sizes = [local.commit(v(step)).bytes for step in range(4)]
    assert local.bytes_to_pull(v(3), base=v(1)) == sizes[2] + sizes[3]
    assert local.bytes_to_pull(v(3)) == local.bytes_to_pull(v(3), base=v(7)) == local.bytes_to_pull(v(3), base=v(3)) == sum(sizes)
    assert local.bytes_to_pull(v(0)) == sizes[0]
    assert local.chain(v(3)) == [v(3), v(2), v(1), v(0)]
    assert local.chain(v(0)) == [v(0)]


def test_tensors_of_any_strides_are_brought_up_in_place(local):
    states = history(3)
    publish(local, states)
    wide = torch.empty(1500, 2 * 400).bfloat16()
    out = copies(states[0]) | {"w": wide[:, ::2], "embed": states[0]["embed"].t().clone().t(), "head": states[0]["head"].clone()}
    out["w"].copy_(states[0]["w"])
    found = local.pull(v(2), base=v(0), out=out)
    assert all_same(found, states[2])
    assert all(found[name] is out[name] for name in out)
    assert not out["w"].is_contiguous()


def test_a_held_state_without_ties_or_empty_tensors_is_completed(local):
    states = history(2)
    publish(local, states)
    out = {name: tensor for name, tensor in copies(states[0]).items() if name not in ("embed", "none")}
    found = local.pull(v(1), base=v(0), out=out)
    assert all_same(found, states[1])
    assert found["embed"] is out["head"]


def test_a_held_state_that_lacks_values_is_read_in_whole(local):
    states = history(2)
    publish(local, states)
    out = {"bias": torch.zeros(70_000)}
    found = local.pull(v(1), base=v(0), out=out)
    assert all_same(found, states[1])
    assert found["bias"] is out["bias"]


def test_what_out_cannot_be_is_refused_as_without_a_base(local):
    states = history(2)
    publish(local, states)
    with pytest.raises(UnknownTensor, match="'more'"):
        local.pull(v(1), base=v(0), out=copies(states[0]) | {"more": torch.zeros(1)})
    with pytest.raises(TensorMismatch, match="'w'"):
        local.pull(v(1), base=v(0), out=copies(states[0]) | {"w": torch.zeros(3)})
    for wrong in ({"names": ["w"]}, {"slices": {"w": 1}}, {"device": "cpu"}):
        with pytest.raises(ValueError, match="base"):
            local.pull(v(1), base=v(0), out=copies(states[0]), **wrong)
    with pytest.raises(VersionMissing):
        local.pull(v(9), base=v(0), out=copies(states[0]))


@pytest.mark.parametrize("tensor", ["w", "bias", "scale", "head"])
def test_a_held_state_that_is_not_what_it_is_said_to_be_is_found_out(local, tensor):
    states = history(3)
    publish(local, states)
    out = copies(states[0])
    flat = byte_view(out[tensor])
    flat[len(flat) // 2] ^= 1
    with pytest.raises(Damaged, match="0-1"):
        local.pull(v(2), base=v(0), out=out)
    with pytest.raises(Damaged):
        local.pull(v(2), base=v(1), out=copies(states[0]))
    assert all_same(local.pull(v(2), base=v(2), out=out), states[2])
