"""What verify finds of versions that are stored as changes: that applying them gives what was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from storage.deltas.reader import Changes
from storage.errors import Damaged
from storage.format import layout
from storage.format.commit import encode
from storage.format.numbers import numbers_of, spelled
from storage.keeping import results
from storage.weights import WeightStore
from tests.storage.histories import data_paths, flip, history, model, publish, v


@pytest.fixture
def local(tmp_path: Path) -> WeightStore:
    """Versions 0-0 to 0-5: 0-0 and 0-4 whole, the others changes of the one before."""
    weights = WeightStore(str(tmp_path / "store"), full_every=4)
    publish(weights, history(6))
    return weights


def resealed(weights: WeightStore, step: int, array: str, segment: int) -> None:
    """Changes the checksum of a segment's result in a commit that is otherwise as it should be."""
    commit = weights.commit(v(step))
    entry = commit.deltas[array]
    sums = numbers_of(entry.crc32c).copy()
    sums[segment] ^= 1
    made = replace(commit, deltas={**commit.deltas, array: replace(entry, crc32c=spelled(sums))})
    weights.objects.write(layout.commit_path(v(step)), encode(made))


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_wrong_checksum_of_a_result_is_found_where_a_pull_finds_it(local, step):
    assert local.verify().sound
    resealed(local, step, "bfloat16", 1)
    with pytest.raises(Damaged, match="segment 1 of array bfloat16") as pulled:
        local.pull(v(step))
    (damage,) = local.verify().damages
    assert (damage.path, damage.version) == (layout.commit_path(v(step)), v(step)) == (damage.path, pulled.value.version)
    assert damage.reason == f"{pulled.value.what} {pulled.value.reason}"
    assert damage.tensors == ("embed", "head", "norm", "scale", "w")
    assert local.verify(v(step)).damages == (damage,)


def test_a_base_that_was_swapped_for_another_is_found(local):
    local.objects.delete(layout.commit_path(v(4)))
    other = WeightStore(f"{local.url}-other")
    other.publish(model(seed=9), version=v(4)).result(60)
    for path in other.objects.list():
        local.objects.write(path, other.objects.read(path))
    damages = local.verify().damages
    assert {(damage.path, damage.version) for damage in damages} == {(layout.commit_path(v(5)), v(5))}
    assert {name for damage in damages for name in damage.tensors} == {"bias", "embed", "head", "norm", "scale", "w"}
    assert any("what it is applied to has changed (2 more such segments)" in damage.reason for damage in damages)


def test_a_base_of_another_form_is_found(local):
    local.objects.delete(layout.commit_path(v(4)))
    other = WeightStore(f"{local.url}-other")
    other.publish({"w": torch.zeros(5).bfloat16()}, version=v(4)).result(60)
    for path in other.objects.list():
        local.objects.write(path, other.objects.read(path))
    (damage,) = local.verify(v(5)).damages
    assert damage.version == v(5) and "another form" in damage.reason and "w" in damage.tensors


def test_an_object_that_is_damaged_is_told_of_once_and_not_as_a_result_too(local):
    path = data_paths(local, 0)[0]
    flip(local.objects, path, 5)
    (damage,) = local.verify().damages
    assert (damage.path, damage.reason) == (path, "has changed bytes")
    resealed(local, 5, "bfloat16", 0)  # of another chain, which is looked at all the same
    assert {damage.path for damage in local.verify().damages} == {path, layout.commit_path(v(5))}


def test_results_are_made_a_segment_at_a_time_and_each_once(local, monkeypatch):
    asked = []
    read = Changes.read

    def watched(self, first, last, tensor):
        asked.append((self.version, self.entry.dtype, first, last))
        return read(self, first, last, tensor)

    monkeypatch.setattr(results, "_PIECE", 1)
    monkeypatch.setattr(Changes, "read", watched)
    assert local.verify().sound
    segments = [("bfloat16", 0, 1), ("bfloat16", 1, 2), ("bfloat16", 2, 3), ("float32", 0, 1)]
    assert sorted(asked) == sorted((v(step), *segment) for step in (1, 2, 3, 5) for segment in segments)


@pytest.mark.parametrize("step", [1, 2])
def test_changes_in_unlike_segments_are_checked_version_by_version(tmp_path, monkeypatch, step):
    weights = WeightStore(str(tmp_path), full_every=4)
    states = history(3)
    publish(weights, states[:2])
    monkeypatch.setattr("storage.deltas.changes.SEGMENT_BYTES", layout.SEGMENT_BYTES // 2)
    publish(weights, states[2:], first=2)
    assert len({weights.commit(v(step)).deltas["bfloat16"].segment for step in (1, 2)}) == 2
    assert weights.verify().sound
    resealed(weights, step, "bfloat16", 2)
    (damage,) = weights.verify().damages
    assert damage.version == v(step) and "segment 2 of array bfloat16" in damage.reason
