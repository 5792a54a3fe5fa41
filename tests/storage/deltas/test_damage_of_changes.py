from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from storage.deltas import chains
from storage.errors import Damaged
from storage.format import layout
from storage.format.commit import Commit, encode
from storage.format.numbers import numbers_of, spelled
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.histories import all_same, copies, data_paths, flip, history, model, publish, v


@pytest.mark.parametrize("held", [None, 1])
def test_a_flipped_bit_anywhere_below_is_found_and_named(local, held):
    states = history(3)
    publish(local, states)
    for step in (0, 1, 2):
        for path in data_paths(local, step):
            size = len(local.objects.read(path))
            for at in (0, size // 2, size - 1):
                before = flip(local.objects, path, at)
                out = copies(states[1])
                base = None if held is None else v(held)
                if held is not None and step <= held:
                    assert all_same(local.pull(v(2), base=base, out=out), states[2])
                else:
                    with pytest.raises(Damaged, match="tensor '") as found:
                        local.pull(v(2), base=base, out=out)
                    assert found.value.version == v(step)
                local.objects.write(path, before)
    assert all_same(local.pull(v(2)), states[2])


def test_a_missing_stream_chunk_is_damage_and_not_zeros(weights):
    states = history(2)
    publish(weights, states)
    path = data_paths(weights, 1)[0]
    weights.objects.delete(path)
    for how in ({}, {"base": v(0), "out": copies(states[0])}):
        with pytest.raises(Damaged, match="is missing"):
            weights.pull(v(1), **how)


def swapped_base(local: WeightStore) -> None:
    """Puts another version in the place of 0-0, as valid as the one before, and laid out alike."""
    local.objects.delete(layout.commit_path(v(0)))
    other = WeightStore(f"{local.url}-other")
    publish(other, [model(seed=9)])
    for path in other.objects.list(""):
        local.objects.write(path, other.objects.read(path))


def test_a_base_with_other_values_is_found_out_by_the_checksums(local):
    publish(local, history(3))
    swapped_base(local)
    assert all_same(local.pull(v(0)), model(seed=9))
    for how in ({}, {"names": ["norm"]}, {"slices": {"w": slice(3, 4)}}):
        with pytest.raises(Damaged, match=r"tensor '.*' of version 0-1 .* what it is applied to has changed"):
            local.pull(v(2), **how)


def test_a_base_of_another_form_is_refused(local):
    publish(local, history(2))
    local.objects.delete(layout.commit_path(v(0)))
    WeightStore(local.url).publish({"w": torch.zeros(5).bfloat16()}, version=Version(7, 0)).result(60)
    commit = local.commit(Version(7, 0))
    rewritten(local, commit, version=v(0))
    with pytest.raises(Damaged, match="another form"):
        local.pull(v(1))


def test_a_chain_whose_base_is_gone_says_so(local):
    publish(local, history(3))
    local.objects.delete(layout.commit_path(v(0)))
    for call in (lambda: local.pull(v(2)), lambda: local.chain(v(2)), lambda: local.bytes_to_pull(v(2))):
        with pytest.raises(Damaged, match=r"version 0-2 .* leads to version 0-0, which is gone"):
            call()


def rewritten(weights: WeightStore, commit: Commit, **changes: object) -> None:
    """Puts a commit with other content, sealed as it should be, in the place of its version's, for its data in the old place."""
    made = replace(commit, **changes)
    old = layout.data_prefix(commit.version, commit.attempt)
    new = layout.data_prefix(made.version, made.attempt)
    if old != new:
        for path in weights.objects.list(old):
            weights.objects.write(path.replace(old, new), weights.objects.read(path))
    weights.objects.write(layout.commit_path(made.version), encode(made))


def test_a_base_that_is_not_older_is_refused(local):
    publish(local, history(3))
    commit = local.commit(v(1))
    for base in (v(1), v(2), Version(3, 0)):
        rewritten(local, commit, base=base)
        with pytest.raises(Damaged, match="isn't older"):
            local.pull(v(2))


def test_a_chain_that_is_too_long_is_refused(local, monkeypatch):
    states = history(4)
    publish(local, states)
    monkeypatch.setattr(chains, "LONGEST_CHAIN", 3)
    assert all_same(local.pull(v(2)), states[2])
    with pytest.raises(Damaged, match="leads through 3 versions"):
        local.pull(v(3))


def test_a_delta_entry_that_cannot_be_is_refused_before_anything_is_read(local):
    publish(local, history(2))
    commit = local.commit(v(1))
    entry = commit.deltas["bfloat16"]
    sizes = numbers_of(entry.sizes)
    cases: list[dict[str, object]] = [
        *({"segment": size} for size in (0, 1001, 1 << 30)),
        *({"length": length} for length in (0, entry.length + 2**20)),
        *({"chunk": chunk} for chunk in (0, 1 << 40)),
        *({"dtype": dtype} for dtype in ("float128", "float16")),
        *({"stream": stream} for stream in ("nowhere", "float32-delta", None)),
        *({"sizes": spelled(wrong)} for wrong in (sizes[:-1], sizes + 1, sizes * 100)),
        *({"sizes": text} for text in ("~~~~", "AAA=")),
        {"crc32c": ""},
    ]
    for change in cases:
        rewritten(local, commit, deltas={**commit.deltas, "bfloat16": replace(entry, **change)})
        with pytest.raises(Damaged, match="is refused"):
            local.commit(v(1))
    for changes in (
        {"deltas": {}},
        {"base": None},
        {"deltas": {**commit.deltas, "../x": entry}},
        {"deltas": {**commit.deltas, "bfloat16-delta": entry}},
    ):
        rewritten(local, commit, **changes)
        with pytest.raises(Damaged, match="is refused"):
            local.commit(v(1))


def test_any_flipped_bit_of_an_entrys_sizes_and_sums_is_never_other_values(local):
    states = history(2)
    publish(local, states)
    commit = local.commit(v(1))
    entry = commit.deltas["bfloat16"]
    for field in ("sizes", "crc32c"):
        numbers = numbers_of(getattr(entry, field)).copy()
        numbers[0] ^= 1
        if field == "sizes":
            numbers[1] ^= 1
            if numbers.sum() != numbers_of(entry.sizes).sum():
                numbers[1] ^= 1
                numbers[1] += int(numbers_of(entry.sizes).sum()) - int(numbers.sum())
        rewritten(local, commit, deltas={**commit.deltas, "bfloat16": replace(entry, **{field: spelled(numbers)})})
        for how in ({}, {"base": v(0), "out": copies(states[0])}):
            with pytest.raises(Damaged, match="segment 0 of array bfloat16"):
                local.pull(v(1), **how)
