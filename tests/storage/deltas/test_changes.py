from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.arrays.packing import pack
from storage.deltas import chains
from storage.errors import Damaged, StoreError
from storage.format import layout
from storage.format.dtypes import TORCH_OF
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.histories import State, all_same, copies, history, model, publish, stepped, updated, v
from tests.storage.tensors import of_bits, same


def test_versions_between_full_ones_hold_what_has_changed_and_come_back_bit_for_bit(weights):
    states = history(6)
    publish(weights, states)
    assert [weights.commit(v(step)).base for step in range(6)] == [None, v(0), v(1), v(2), None, v(4)]
    for step, state in enumerate(states):
        pulled = weights.pull(v(step))
        assert all_same(pulled, state)
        assert pulled["head"] is pulled["embed"]
    full, delta = weights.commit(v(0)), weights.commit(v(1))
    assert delta.bytes < 0.025 * full.bytes
    assert delta.requires == ("deltas",)
    assert sorted(delta.deltas) == ["bfloat16", "float32"]
    assert sorted(delta.arrays) == ["bfloat16-delta", "float32-delta"]


def test_every_version_is_full_unless_asked_otherwise(tmp_path):
    weights = WeightStore(str(tmp_path))
    publish(weights, history(2))
    assert weights.commit(v(1)).base is None
    assert weights._writer._base is None, "memory for a base that is never used"


def test_a_foreground_publish_makes_and_leaves_a_base_too(local):
    states = history(3)
    live = copies(states[0])
    for step, state in enumerate(states):
        for name, tensor in live.items():
            tensor.copy_(state[name])
        local.publish(live, version=v(step), background=False)
    assert [local.commit(v(step)).base for step in range(3)] == [None, v(0), v(1)]
    assert all(all_same(local.pull(v(step)), state) for step, state in enumerate(states))


@pytest.mark.parametrize("full_every", [0, -1, chains.LONGEST_CHAIN + 1])
def test_a_spacing_of_full_versions_that_cannot_be_is_refused(tmp_path, full_every):
    with pytest.raises(ValueError, match="full_every"):
        WeightStore(str(tmp_path), full_every=full_every)


def test_the_spacing_travels_by_pickle_and_the_base_does_not(local):
    states = history(3)
    publish(local, states[:1])
    again = pickle.loads(pickle.dumps(local))  # noqa: S301
    publish(again, states[1:], 1)
    assert [again.commit(v(step)).base for step in range(3)] == [None, None, v(1)]


def other_layouts() -> dict[str, State]:
    state = model(rows=40)
    reordered = dict(reversed(state.items()))
    return {
        "a name": {**{n: t for n, t in state.items() if n != "w"}, "renamed": state["w"]},
        "a name less": {n: t for n, t in state.items() if n != "w"},
        "a shape": {**state, "w": state["w"].t()},
        "a type": {**state, "bias": state["bias"].double()},
        "no tie": {**state, "head": state["embed"].clone()},
        "another order": reordered,
        "an empty tensor's shape": {**state, "none": torch.empty(3, 0)},
    }


@pytest.mark.parametrize("difference", other_layouts())
def test_another_layout_is_written_in_full(local, difference):
    other = other_layouts()[difference]
    publish(local, [model(rows=40), other])
    assert local.commit(v(1)).base is None
    assert all_same(local.pull(v(1)), other)


def test_what_has_changed_all_over_is_written_in_full(local):
    state = {"w": of_bits(torch.float32, 1000, 100, seed=1)}
    other = {"w": of_bits(torch.float32, 1000, 100, seed=2)}
    publish(local, [state, other])
    commit = local.commit(v(1))
    assert commit.base is None
    assert list(commit.arrays) == ["float32"]
    assert all_same(local.pull(v(1)), other)


def test_a_version_that_is_not_newer_than_the_last_one_is_written_in_full(local):
    lineage = local.open_lineage(None)
    local.publish(model(), version=v(5)).result(60)
    assert local.open_lineage(v(5)) == lineage + 1
    local.publish(model(), version=Version(lineage + 1, 6)).result(60)
    local.publish(model(), version=v(7)).result(60)
    assert local.commit(Version(lineage + 1, 6)).base == v(5)
    assert local.commit(v(7)).base is None


def test_an_unchanged_version_stores_no_array_at_all(local):
    publish(local, [model(), model()])
    commit = local.commit(v(1))
    assert (commit.arrays, commit.bytes) == ({}, 0)
    assert {delta.stream for delta in commit.deltas.values()} == {None}
    assert all_same(local.pull(v(1)), model())


def test_after_a_version_that_another_publisher_won_the_next_is_full(local):
    states = history(5)
    publish(local, states[:2])
    WeightStore(local.url).publish(states[4], version=v(2)).result(60)
    with pytest.raises(StoreError):
        local.publish(states[2], version=v(2)).result(60)
    publish(local, states[3:], 3)
    assert [local.commit(v(step)).base for step in range(5)] == [None, v(0), None, None, v(3)]
    assert all_same(local.pull(v(3)), states[3])


def test_after_the_base_is_gone_the_next_is_full(local):
    states = history(2)
    publish(local, states[:1])
    local.objects.delete(layout.commit_path(v(0)))
    publish(local, states[1:], 1)
    assert local.commit(v(1)).base is None


@pytest.mark.many_requests
def test_a_kill_at_any_write_leaves_whole_versions_and_a_publisher_that_goes_on(place, dying, killed):
    states = history(3)
    publish(WeightStore(*place, full_every=9), states[:1])
    left = 0
    while True:
        weights = WeightStore.over(dying(10**6), full_every=9)
        weights.publish(states[0], version=Version(left + 1, 0), background=False)
        weights.objects.budget[0] = left
        try:
            weights.publish(states[1], version=Version(left + 1, 1), background=False)
        except killed:
            weights.objects.budget[0] = 10**6
            reader = WeightStore(*place)
            assert reader.newest() == Version(left + 1, 0)
            assert all_same(reader.pull(), states[0])
            weights.publish(states[2], version=Version(left + 1, 2), background=False)
            assert weights.commit(Version(left + 1, 2)).base is None
            assert all_same(reader.pull(), states[2])
            left += 1
            continue
        assert weights.commit(Version(left + 1, 1)).base == Version(left + 1, 0)
        break
    assert left >= 5, "two arrays' data and metadata, and the commit, are each a write"


@pytest.mark.many_requests
def test_names_and_slices_of_a_delta_are_what_the_whole_has(weights):
    states = history(4)
    publish(weights, states)
    for step in (1, 3):
        state = states[step]
        found = weights.pull(v(step), names=["w", "scale"])
        assert all_same(found, {name: state[name] for name in found})
        cuts = {"w": (slice(200, 300), slice(3, 9)), "head": slice(1499, None), "bias": slice(65_000, 65_001), "embed": 7}
        found = weights.pull(v(step), names=list(cuts), slices=cuts)
        assert all(same(found[name], state[name][cut]) for name, cut in cuts.items())


def test_a_slice_reads_no_more_of_base_and_changes_than_its_segments(local, monkeypatch):
    states = [model(rows=6_000)]  # 11 MB of bfloat16
    states += [stepped(states[0], 1), stepped(states[0], 2)]
    publish(local, states)
    fetched: dict[str, int] = {}
    read_into = ObjectStore.read_into

    def counted(self, path, buffers, start=0, seen=None):
        size = len(buffers) if isinstance(buffers, np.ndarray) else sum(map(len, buffers))
        array = f"{self.url}/{path}".split("/")[-3]
        fetched[array] = fetched.get(array, 0) + size
        return read_into(self, path, buffers, start, seen)

    monkeypatch.setattr(ObjectStore, "read_into", counted)
    found = local.pull(v(2), names=["w"], slices={"w": slice(5_000, 5_010)})
    assert same(found["w"], states[2]["w"][5_000:5_010])
    assert fetched["bfloat16"] <= 2 * layout.SEGMENT_BYTES
    assert fetched["bfloat16-delta"] <= 2 * (2 * 0.03 * layout.SEGMENT_BYTES + 2 * layout.BLOCK_BYTES)


@st.composite
def layouts(draw):
    """Names, types, shapes and ties of a state, as (type, shape, index of the tensor that it is tied to or None)."""
    found = []
    for i in range(draw(st.integers(1, 6))):
        tied = draw(st.integers(0, i - 1)) if i and draw(st.integers(0, 4)) == 0 else None
        found.append((draw(st.sampled_from(sorted(TORCH_OF))), tuple(draw(st.lists(st.integers(0, 9), max_size=3))), tied))
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout_of=layouts(),
    shares=st.lists(st.sampled_from([0.0, 0.02, 0.3, 0.7]), min_size=1, max_size=5),
    full_every=st.integers(2, 6),
    segment=st.sampled_from([16, 64, 1 << 20]),
    chunk_bytes=st.sampled_from([64, 1000, 1 << 20]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_history_comes_back_bit_for_bit(tmp_path_factory, monkeypatch, layout_of, shares, full_every, segment, chunk_bytes, seed, data):
    monkeypatch.setattr("storage.deltas.changes.SEGMENT_BYTES", segment)
    monkeypatch.setattr("storage.deltas.changes.WORTH", 100.0)
    monkeypatch.setattr("storage.weights.pack", lambda state, copy: pack(state, chunk_bytes, copy=copy))
    state: State = {}
    for i, (dtype, shape, tied) in enumerate(layout_of):
        state[f"t{i}"] = of_bits(TORCH_OF[dtype], *shape, seed=seed + i) if tied is None else list(state.values())[tied]
    states = [state]
    for step, share in enumerate(shares):
        states.append(updated(states[-1], 100 * step + seed, share))
    weights = WeightStore(str(tmp_path_factory.mktemp("history")), full_every=full_every)
    publish(weights, states)
    for step, wanted in enumerate(states):
        if any(tensor.numel() for tensor in wanted.values()):
            assert (weights.commit(v(step)).base is None) == (step % full_every == 0)
        assert all_same(weights.pull(v(step)), wanted)
    held, asked = data.draw(st.integers(0, len(shares))), data.draw(st.integers(0, len(shares)))
    assert all_same(weights.pull(v(asked), base=v(held), out=copies(states[held])), states[asked])
    name = data.draw(st.sampled_from(list(state)))
    tensor = states[asked][name]
    assert same(weights.pull(v(asked), names=[name])[name], tensor)
    if tensor.ndim:
        cut = slice(*sorted((data.draw(st.integers(0, tensor.shape[0])), data.draw(st.integers(0, tensor.shape[0])))))
        assert same(weights.pull(v(asked), names=[name], slices={name: cut})[name], tensor[cut])
    wrong = copies(states[data.draw(st.integers(0, len(shares)))])
    with contextlib.suppress(Damaged):
        assert all_same(weights.pull(v(asked), base=v(held), out=wrong), states[asked])
