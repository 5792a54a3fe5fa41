"""What parts of tensors cost, and which parts there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage.errors import SliceRefused, TensorMismatch, UnknownTensor
from storage.format.layout import BLOCK_BYTES
from storage.objects.store import ObjectStore
from storage.weights import WeightStore
from tests.storage.tensors import same

ROWS, ROW = 4096, 2048 * 2
"""A matrix of 16 MiB in rows of 4 KiB."""


class Counting(ObjectStore):
    """Counts the bytes and requests of reads of chunks."""

    bytes: list[int]

    def child(self, prefix: str) -> Counting:
        child = super().child(prefix)
        child.bytes = self.bytes
        return child

    def read_into(self, path, buffer, start=0, seen=None):
        self.bytes.append(len(buffer) if isinstance(buffer, np.ndarray) else sum(map(len, buffer)))
        return super().read_into(path, buffer, start, seen)


@pytest.fixture(scope="module")
def matrix():
    return torch.arange(ROWS * ROW // 2, dtype=torch.int16).view(torch.bfloat16).view(ROWS, ROW // 2)


@pytest.fixture
def counting(tmp_path, matrix):
    state = {"before": torch.ones(1000).bfloat16(), "w": matrix, "experts": matrix.view(8, 512, ROW // 2), "after": torch.zeros(77).bfloat16()}
    WeightStore(str(tmp_path)).publish({name: tensor.clone() for name, tensor in state.items()}, step=0, background=False)
    objects = Counting(str(tmp_path))
    objects.bytes = []
    return WeightStore.over(objects), objects.bytes


def test_rows_cost_their_own_bytes_rounded_to_blocks(counting, matrix):
    weights, read = counting
    for rows in (slice(0, 1), slice(100, 600), slice(-700, None), slice(1000, 3900), 7):
        read.clear()
        found = weights.pull(names=["w"], slices={"w": rows})["w"]
        assert same(found, matrix[rows])
        chunks = len(read)
        assert sum(read) <= found.numel() * 2 + chunks * 2 * BLOCK_BYTES


def test_columns_cost_at_most_the_bytes_of_their_rows(counting, matrix):
    weights, read = counting
    found = weights.pull(names=["w"], slices={"w": (slice(100, 600), slice(512, 1024))})["w"]
    assert same(found, matrix[100:600, 512:1024])
    assert sum(read) <= 500 * ROW + len(read) * 2 * BLOCK_BYTES


def test_rows_of_each_of_several_matrices_do_not_cost_what_is_between_them(counting, matrix):
    weights, read = counting
    found = weights.pull(names=["experts"], slices={"experts": (slice(None), slice(0, 64))})["experts"]
    assert same(found, matrix.view(8, 512, ROW // 2)[:, :64])
    assert sum(read) <= 8 * (64 * ROW + 2 * BLOCK_BYTES)


def test_all_of_a_state_costs_one_read_a_chunk(counting):
    weights, read = counting
    pulled = weights.pull()
    commit = weights.commit(weights.newest())
    assert len(read) == sum(len(array.chunks) for array in commit.arrays.values())
    assert sum(read) == sum(chunk.bytes for array in commit.arrays.values() for chunk in array.chunks)
    read.clear()
    weights.pull(out=pulled)
    assert len(read) == sum(len(array.chunks) for array in commit.arrays.values())


def test_out_has_the_shape_of_the_slice(tmp_path):
    weights = WeightStore(str(tmp_path))
    state = {"w": torch.randn(6, 5), "tied": torch.zeros(0)}
    state["tied"] = state["w"]
    weights.publish(state, step=0, background=False)
    out = {"w": torch.zeros(5, 3).t()}
    pulled = weights.pull(slices={"w": slice(1, 4)}, out=out)
    assert pulled["w"] is out["w"] and torch.equal(out["w"], state["w"][1:4])
    assert torch.equal(pulled["tied"], state["w"]), "a tied tensor that isn't cut is whole"
    with pytest.raises(TensorMismatch, match=r"'w' is float32 \[3, 5\]"):
        weights.pull(slices={"w": slice(1, 4)}, out={"w": torch.zeros(6, 5)})
    both = weights.pull(slices={"w": slice(1, 4), "tied": slice(-5, 4)})
    assert both["w"] is both["tied"], "tied tensors that are cut alike come back as one"


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        (slice(0, 4, 2), "steps of 2"), (slice(None, None, -1), "steps of -1"), (6, "indices 0 to 5, and 6"), (-7, "and -7"),
        ((0, 0, 0), "has 2 dimensions, and 3"), (slice("a", None), "can't be cut by"), ("a", "by str"), (True, "True"), (1.0, "by float"),
        (..., "by ellipsis"), (slice(0, 4, 0), "zero"),
    ],
)  # fmt: skip
def test_what_is_no_plain_part_of_a_tensor_is_refused_by_its_name(tmp_path, slices, said):
    weights = WeightStore(str(tmp_path))
    weights.publish({"layer.w": torch.randn(6, 5)}, step=0, background=False)
    with pytest.raises(SliceRefused, match=rf"'layer\.w'.*{said}|{said}.*'layer\.w'"):
        weights.pull(slices={"layer.w": slices})
    with pytest.raises(IndexError):
        weights.pull(slices={"layer.w": slices})


def test_slices_of_a_tensor_that_is_not_there_are_refused(tmp_path):
    weights = WeightStore(str(tmp_path))
    weights.publish({"w": torch.randn(6, 5)}, step=0, background=False)
    with pytest.raises(UnknownTensor, match="'v'"):
        weights.pull(slices={"v": 0})
