from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.format.boxes import boxes_of, common, covers, runs_of, sizes, whole, within

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@settings(deadline=None)
@given(shape=SHAPES, data=st.data())
def test_the_boxes_of_a_flat_range_hold_its_values_in_order(shape, data):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    end = data.draw(st.integers(start, tensor.numel()))
    boxes = list(boxes_of(shape, start, end))
    found = [value for box in boxes for value in tensor[box].reshape(-1).tolist()]
    assert found == list(range(start, end))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@settings(deadline=None)
@given(shape=SHAPES, gap=st.integers(0, 30), data=st.data())
def test_the_runs_of_a_box_hold_all_of_it_and_more_only_over_gaps_that_may_be_read(shape, gap, data):
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    box = tuple(slice(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    wanted = tensor[box].reshape(-1).tolist()
    runs = runs_of(shape, box, gap)
    held = [value for start in runs.starts for value in range(start, start + runs.length)]
    assert set(wanted) <= set(held)
    assert runs.exact == (held == wanted)
    assert all(later - (earlier + runs.length) > gap for earlier, later in itertools.pairwise(runs.starts))
    extra = sorted(set(held) - set(wanted))
    runs_of_extra = [len(list(group)) for _, group in itertools.groupby(enumerate(extra), lambda pair: pair[1] - pair[0])]
    assert max(runs_of_extra, default=0) <= gap


def test_what_boxes_have_in_common_and_where_that_is_in_one_of_them():
    one, other = (slice(2, 6), slice(0, 4)), (slice(4, 9), slice(3, 8))
    shared = common(one, other)
    assert shared == (slice(4, 6), slice(3, 4))
    assert within(shared, [4, 3]) == (slice(0, 2), slice(0, 1))
    assert sizes(shared) == (2, 1)
    assert common(one, (slice(6, 9), slice(0, 4))) is None


def split(draw: st.DrawFn, box: tuple[slice, ...], depth: int) -> list[tuple[slice, ...]]:
    wide = [dimension for dimension, cut in enumerate(box) if cut.stop - cut.start > 1]
    if not depth or not wide or draw(st.integers(0, 3)) == 0:
        return [box]
    dimension = draw(st.sampled_from(wide))
    cut = box[dimension]
    at = draw(st.integers(cut.start + 1, cut.stop - 1))
    halves = [(*box[:dimension], part, *box[dimension + 1 :]) for part in (slice(cut.start, at), slice(at, cut.stop))]
    return [part for half in halves for part in split(draw, half, depth - 1)]


@st.composite
def partitions(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    return shape, draw(st.permutations(split(draw, whole(shape), 4)))


@settings(deadline=None)
@given(partition=partitions(), data=st.data())
def test_boxes_cover_if_each_value_is_in_one_of_them_and_only_then(partition, data):
    shape, boxes = partition
    assert covers(whole(shape), boxes)
    changed = data.draw(st.integers(0, len(boxes) - 1))
    others = boxes[:changed] + boxes[changed + 1 :]
    assert not covers(whole(shape), others)
    assert not covers(whole(shape), [*boxes, boxes[changed]])
    dimension = data.draw(st.integers(0, len(shape) - 1))
    cut = boxes[changed][dimension]
    moved = slice(cut.start + 1, cut.stop + 1)
    assert not covers(whole(shape), [*others, (*boxes[changed][:dimension], moved, *boxes[changed][dimension + 1 :])])


def test_a_pinwheel_covers_though_no_cut_goes_through_it():
    boxes = [
        (slice(0, 2), slice(0, 1)),
        (slice(0, 1), slice(1, 3)),
        (slice(1, 3), slice(2, 3)),
        (slice(2, 3), slice(0, 2)),
        (slice(1, 2), slice(1, 2)),
    ]
    assert covers((slice(0, 3), slice(0, 3)), boxes)
    assert not covers((slice(0, 3), slice(0, 3)), boxes[:4])


def test_a_gap_and_an_overlap_of_the_same_size_do_not_make_up_for_each_other():
    assert not covers((slice(0, 6),), [(slice(0, 4),), (slice(2, 4),)])
    assert not covers((slice(0, 2), slice(0, 2)), [(slice(0, 1), slice(0, 2)), (slice(0, 1), slice(0, 2))])
