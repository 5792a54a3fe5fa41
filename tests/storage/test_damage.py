"""What a reader and the next publisher find after a crash, a lost object, a changed byte or a hostile commit."""

from __future__ import annotations

import json
import pickle
import sys
from functools import partial

import pytest
import torch

from storage.arrays.packing import pack
from storage.errors import Damaged, StoreError, UnknownFormat
from storage.format import layout
from storage.format.commit import sealed
from storage.version import Version
from storage.weights import WeightStore

V0, V1 = Version(0, 0), Version(0, 1)


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {"first": torch.full((500,), value), "zeros": torch.zeros(900), "half": torch.full((300,), value).bfloat16()}


@pytest.fixture
def weights(place, monkeypatch):
    monkeypatch.setattr("storage.weights.pack", partial(pack, chunk_bytes=1000))
    weights = WeightStore(*place)
    weights.publish(state_of(1.0), version=V0, metadata={"who": "trainer"}).result(60)
    return weights


@pytest.fixture
def objects(weights):
    return weights._versioned.store


def test_a_kill_at_every_write_leaves_the_previous_version_and_the_next_publish_works(weights, dying, killed):
    writes = 0
    while True:
        publication = WeightStore.over(dying(writes)).publish(state_of(2.0), version=V1)
        if publication._future.exception(60) is None:
            break
        with pytest.raises(killed):
            publication.result()
        assert weights.newest() == V0
        assert torch.equal(weights.pull()["first"], torch.full((500,), 1.0))
        writes += 1
    chunks = sum(len(array.chunks) for array in weights.commit(V1).arrays.values())
    assert writes == 3 + chunks + 1, "the group's and both arrays' metadata, every chunk, the commit"
    assert torch.equal(weights.pull()["first"], torch.full((500,), 2.0))


@pytest.mark.many_requests
def test_a_kill_at_every_write_of_a_publish_in_the_foreground_leaves_the_previous_version(weights, dying, killed):
    files = {"config.json": b"{}", "tokenizer.json": b"tokens"}
    writes = 0
    while True:
        try:
            WeightStore.over(dying(writes)).publish(state_of(2.0), step=1, files=files, background=False)
        except killed:
            assert weights.newest() == V0
            assert torch.equal(weights.pull()["first"], torch.full((500,), 1.0))
            writes += 1
        else:
            break
    chunks = sum(len(array.chunks) for array in weights.commit(V1).arrays.values())
    assert writes == 3 + chunks + 2, "metadata, chunks, the first file, and the second or the commit: a file that is there isn't put again"
    assert {name: weights.file(V1, name) for name in files} == files


def test_a_flipped_bit_in_a_chunk_is_found_and_named_wherever_it_is(weights, objects):
    commit = weights.commit(V0)
    prefix = layout.data_prefix(V0, commit.attempt)
    for array in commit.arrays.values():
        for chunk in {array.chunks[0], array.chunks[-1]}:
            path = f"{prefix}/{chunk.key}"
            good = objects.read(path)
            for at in (0, len(good) // 2, len(good) - 1):
                objects.write(path, good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
                with pytest.raises(Damaged, match="changed bytes") as caught:
                    weights.pull()
                assert caught.value.version == V0
                assert caught.value.tensor in commit.tensors
                assert chunk.key in str(caught.value)
            objects.write(path, good)
    assert torch.equal(weights.pull()["first"], torch.full((500,), 1.0))


def test_a_flipped_bit_is_found_when_a_part_is_read(place):
    weights = WeightStore(*place)
    weights.publish({f"t{i}": torch.randn(1 << 15) for i in range(8)}, version=V0).result(60)  # 128 KiB each, in one chunk
    objects = weights._versioned.store
    path = f"{layout.data_prefix(V0, weights.commit(V0).attempt)}/float32/c/0"
    good = objects.read(path)
    at = 5 * (128 << 10) + 77
    objects.write(path, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(Damaged, match="changed bytes") as caught:
        weights.pull(names=["t5"])
    assert caught.value.tensor == "t5"
    assert weights.pull(names=["t2"])["t2"].shape == (1 << 15,)
    objects.write(path, good[: 5 * (128 << 10)])
    with pytest.raises(Damaged, match="another size"):
        weights.pull(names=["t5"])


def test_a_missing_chunk_is_an_error_and_never_zeros(weights, objects):
    commit = weights.commit(V0)
    for array in commit.arrays.values():
        for chunk in array.chunks:
            path = f"{layout.data_prefix(V0, commit.attempt)}/{chunk.key}"
            good = objects.read(path)
            objects.delete(path)
            with pytest.raises(Damaged, match="is missing") as caught:
                weights.pull()
            assert (caught.value.version, caught.value.tensor is None) == (V0, False)
            objects.write(path, good)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
def test_a_chunk_of_another_size_is_an_error(weights, objects, change):
    path = f"{layout.data_prefix(V0, weights.commit(V0).attempt)}/float32/c/1"
    objects.write(path, change(objects.read(path)))
    with pytest.raises(Damaged, match="another size"):
        weights.pull()


def test_a_chunk_of_another_place_is_an_error_though_its_own_checksum_holds(weights, objects):
    prefix = layout.data_prefix(V0, weights.commit(V0).attempt)
    objects.write(f"{prefix}/float32/c/0", objects.read(f"{prefix}/float32/c/3"))
    with pytest.raises(Damaged, match="changed bytes"):
        weights.pull()


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_any_changed_or_cut_byte_of_a_commit_is_found(weights, objects):
    path = layout.commit_path(V0)
    good = objects.read(path)
    for at in range(0, len(good), max(1, len(good) // 60)):
        objects.write(path, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises((Damaged, UnknownFormat), match=r"commits/0-00000000\.json"):
            weights.pull()
        objects.write(path, good[:at])
        with pytest.raises(Damaged, match=r"commits/0-00000000\.json"):
            weights.pull()


def test_a_commit_put_in_another_version_s_place_is_refused(weights, objects):
    objects.write(layout.commit_path(V1), objects.read(layout.commit_path(V0)))
    with pytest.raises(Damaged, match="says that it is version 0-0"):
        weights.pull(V1)


def rewrite(objects, change) -> None:
    """Puts a commit with `change` made to it, and its checksum right."""
    commit = json.loads(objects.read(layout.commit_path(V0)))
    del commit["sha256"]
    commit = change(commit) or commit
    objects.write(layout.commit_path(V0), sealed(json.dumps(commit, separators=(",", ":")).encode()))


def test_a_commit_rewritten_as_it_was_is_read(weights, objects):
    rewrite(objects, lambda commit: None)
    assert torch.equal(weights.pull()["first"], torch.full((500,), 1.0))


def test_a_later_format_and_an_unknown_feature_are_refused_as_such(weights, objects):
    good = objects.read(layout.commit_path(V0))
    for change in ({"format": 2}, {"format": 0}, {"requires": ["teleport"]}):
        rewrite(objects, lambda commit, change=change: {**commit, **change})
        with pytest.raises(UnknownFormat, match="newer"):
            weights.pull()
        objects.write(layout.commit_path(V0), good)
    rewrite(objects, lambda commit: commit["tensors"]["first"].update(encoding="sparse"))
    with pytest.raises(UnknownFormat, match="sparse"):
        weights.pull()


SHARD = {"start": [0], "shape": [500], "array": "float32", "offset": 0}
NO_TENSOR = {"dtype": "float32", "shape": [0], "array": None, "offset": 0, "numel": 0}
FILE = {"key": "files/" + "0" * 64, "bytes": 1, "sha256": "0" * 64}


def shard(commit, boxes, array="float32") -> None:
    """Says of `first`, 500 values from value 0 of 1400, that it is in shards."""
    shards = [{"start": start, "shape": shape, "array": array, "offset": offset} for start, shape, offset in boxes]
    commit["tensors"]["first"].update(array=None, offset=0, shards=shards)


HOSTILE = {
    "offset past the end": lambda c: c["tensors"]["first"].update(offset=10**6),
    "negative offset": lambda c: c["tensors"]["first"].update(offset=-4),
    "too many values": lambda c: c["tensors"]["first"].update(numel=10**12, shape=[10**12]),
    "shape and values differ": lambda c: c["tensors"]["first"].update(shape=[501]),
    "negative dimensions": lambda c: c["tensors"]["first"].update(shape=[-5, -100]),
    "overlap": lambda c: c["tensors"].update({f"bomb{i}": c["tensors"]["zeros"] for i in range(3)}),
    "array of another type": lambda c: c["tensors"]["first"].update(array="bfloat16"),
    "no such array": lambda c: c["tensors"]["first"].update(array="../../secret"),
    "no array": lambda c: c["tensors"]["first"].update(array=None),
    "unknown type": lambda c: c["tensors"]["first"].update(dtype="pickle"),
    "number as text": lambda c: c["tensors"]["first"].update(offset="0"),
    "alias of nothing": lambda c: c["tensors"]["first"].update(alias_of="nothing"),
    "alias of itself": lambda c: c["tensors"]["first"].update(alias_of="first"),
    "alias of another shape": lambda c: c["tensors"]["first"].update(alias_of="zeros"),
    "chunk key outside": lambda c: c["arrays"]["float32"]["chunks"][0].update(key="../../../etc/passwd"),
    "chunk key of another": lambda c: c["arrays"]["float32"]["chunks"][0].update(key="float32/c/1"),
    "chunk size": lambda c: c["arrays"]["float32"]["chunks"][0].update(bytes=10**15),
    "huge chunk": lambda c: c["arrays"]["float32"].update(chunk=1 << 40),
    "chunk of 2 GiB": lambda c: c["arrays"]["float32"].update(
        chunk=1 << 29, chunks=[{**c["arrays"]["float32"]["chunks"][0], "bytes": (1 << 31) + 4}]
    ),
    "no chunk size": lambda c: c["arrays"]["float32"].update(chunk=0),
    "no block size": lambda c: c["arrays"]["float32"].update(block_bytes=0),
    "chunks missing": lambda c: c["arrays"]["float32"]["chunks"].pop() and None,
    "longer than its chunks": lambda c: c["arrays"]["float32"].update(length=10**15),
    "array name outside": lambda c: c["arrays"].update({"../x": c["arrays"].pop("bfloat16")}),
    "array of unknown type": lambda c: c["arrays"]["bfloat16"].update(dtype="object"),
    "attempt outside": lambda c: c.update(attempt="../../../../tmp"),
    "object outside": lambda c: c["objects"][0].update(key="../../zarr.json"),
    "document outside": lambda c: c.update(documents={"d": {"key": "documents/../../x", "bytes": 1, "sha256": "0"}}),
    "shards outside": lambda c: shard(c, [([0], [400], 0), ([400], [101], 400)]),
    "shards before": lambda c: shard(c, [([-1], [501], 0)]),
    "shards with a gap": lambda c: shard(c, [([0], [200], 0), ([201], [299], 200)]),
    "shards over each other": lambda c: shard(c, [([0], [300], 0), ([200], [300], 300)]),
    "a gap and an overlap in shards": lambda c: shard(c, [([0], [250], 0), ([0], [250], 250)]),
    "shards of the same values": lambda c: shard(c, [([0], [250], 0), ([250], [250], 0)]),
    "shards of another tensor's values": lambda c: shard(c, [([0], [250], 0), ([250], [250], 600)]),
    "shards past the array": lambda c: shard(c, [([0], [250], 0), ([250], [250], 1399)]),
    "empty shards": lambda c: shard(c, [([0], [500], 0), ([500], [0], 0)]),
    "shards of other dimensions": lambda c: shard(c, [([0, 0], [500, 1], 0)]),
    "shards in an array of another type": lambda c: shard(c, [([0], [500], 0)], "bfloat16"),
    "shards in no array": lambda c: shard(c, [([0], [500], 0)], "../x"),
    "shards and an array": lambda c: c["tensors"]["first"].update(shards=[SHARD]),
    "shards and an alias": lambda c: c["tensors"]["first"].update(shards=[SHARD], array=None, alias_of="zeros"),
    "shards of nothing": lambda c: c["tensors"].update(none={**NO_TENSOR, "shards": [{**SHARD, "start": [0], "shape": [0]}]}),
    "file outside": lambda c: c.update(files={"config.json": {**FILE, "key": "../../etc/passwd"}}),
    "file of another key": lambda c: c.update(files={"config.json": {**FILE, "key": "files/" + "1" * 64}}),
    "file name outside": lambda c: c.update(files={"../config.json": FILE}),
    "file name in a folder": lambda c: c.update(files={"a/config.json": FILE}),
    "file without a digest": lambda c: c.update(files={"config.json": {**FILE, "sha256": "x", "key": "files/x"}}),
    "file of negative size": lambda c: c.update(files={"config.json": {**FILE, "bytes": -1}}),
    "no base": lambda c: c.pop("base") and None,
    "no tensors": lambda c: c.pop("tensors") and None,
    "version": lambda c: c.update(version={"lineage": -1, "step": 0}),
    "an empty tensor of more than 64 bits": lambda c: c["tensors"].update(none={**NO_TENSOR, "shape": [1 << 70, 0]}),
    "an empty tensor whose strides overflow": lambda c: c["tensors"].update(none={**NO_TENSOR, "shape": [1 << 62, 1 << 62, 0]}),
    "requirements in no list": lambda c: c.update(requires=5),
    "thousands of dimensions": lambda c: c["tensors"]["first"].update(shape=[1] * 5000 + [500]),
}


@pytest.mark.parametrize("place", ["memory"], indirect=True)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_an_index_that_cannot_be_true_is_refused(weights, objects, hostile):
    rewrite(objects, HOSTILE[hostile])
    with pytest.raises(Damaged, match="is refused"):
        weights.pull()


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_shards_that_can_be_true_are_read(weights, objects):
    rewrite(objects, lambda commit: shard(commit, [([300], [200], 300), ([0], [300], 0)]))
    assert torch.equal(weights.pull()["first"], torch.full((500,), 1.0))


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_what_is_checked_grows_with_the_entries_and_not_with_their_square(weights, objects):
    def count(entries: int) -> int:
        def fill(commit):
            length = 2 * entries
            commit["arrays"]["float32"].update(length=length, chunk=1)
            template = commit["arrays"]["float32"]["chunks"][0]
            commit["arrays"]["float32"]["chunks"] = [{**template, "key": f"float32/c/{i}", "bytes": 8} for i in range(length)]
            whole = {"dtype": "float32", "shape": [entries], "array": None, "offset": 0, "numel": entries}
            whole["shards"] = [{"start": [i], "shape": [1], "array": "float32", "offset": i} for i in range(entries)]
            one = {"dtype": "float32", "shape": [1], "array": "float32", "numel": 1}
            commit["tensors"] = {"whole": whole} | {f"t{i}": {**one, "offset": entries + i} for i in range(entries)}

        good = objects.read(layout.commit_path(V0))
        rewrite(objects, fill)
        calls = 0

        def called(frame, event, argument) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(called)
        try:
            assert len(weights.commit(V0).tensors) == entries + 1
        finally:
            sys.setprofile(None)
        objects.write(layout.commit_path(V0), good)
        return calls

    assert count(4000) < 4.5 * count(1000)


@pytest.mark.parametrize("place", ["memory"], indirect=True)
@pytest.mark.parametrize("text", [b"", b"[" * 10**5, b'{"format":1,"metadata":' + b'{"a":' * 10**5, b"null", b"\xff", b"[]", b'{"format":1}', b"{}"])
def test_what_is_no_commit_is_refused(weights, objects, text):
    objects.write(layout.commit_path(V0), text)
    with pytest.raises(Damaged):
        weights.pull()


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_true_looking_index_of_huge_arrays_takes_no_memory_before_a_chunk_is_verified(weights, objects):
    def inflate(commit):
        array = commit["arrays"]["float32"]
        chunks = 1 << 14
        array.update(chunk=1 << 28, length=chunks << 28)  # 16 TiB in chunks of 1 GiB
        template = array["chunks"][0]
        array["chunks"] = [{**template, "key": f"float32/c/{i}", "bytes": (1 << 30) + 4} for i in range(chunks)]
        commit["tensors"] = {"huge": {"dtype": "float32", "shape": [chunks << 28], "array": "float32", "offset": 0, "numel": chunks << 28}}

    rewrite(objects, inflate)
    with pytest.raises(Damaged, match="another size") as caught:
        weights.pull()
    assert caught.value.tensor == "huge"


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_an_index_of_huge_shards_takes_no_memory_before_the_store_was_seen_to_hold_them(weights, objects):
    def inflate(commit):
        chunks = 1 << 10
        array = commit["arrays"]["float32"]
        array.update(chunk=1 << 22, length=chunks << 22)  # 16 GiB in chunks of 16 MiB, of which the first is there
        template = array["chunks"][0]
        array["chunks"] = [{**template, "key": f"float32/c/{i}", "bytes": (16 << 20) + 4} for i in range(chunks)]
        half = chunks << 21
        shards = [{"start": [at], "shape": [half], "array": "float32", "offset": at} for at in (0, half)]
        commit["tensors"] = {"huge": {"dtype": "float32", "shape": [2 * half], "array": None, "offset": 0, "numel": 2 * half, "shards": shards}}

    objects.write(f"{layout.data_prefix(V0, weights.commit(V0).attempt)}/float32/c/0", bytes((16 << 20) + 4))
    rewrite(objects, inflate)
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **more: made.append(args))
        with pytest.raises(Damaged, match="float32/c/1 has another size") as caught:
            weights.pull()
    assert (caught.value.tensor, made) == ("huge", [])


def test_a_damaged_lineage_record_is_an_error(weights, objects):
    weights.open_lineage(V0)
    objects.write(layout.lineage_path(1), objects.read(layout.lineage_path(1)).replace(b"0-0", b"0-1"))
    with pytest.raises(Damaged, match=r"lineages/000001\.json"):
        weights.newest()
    objects.write(layout.lineage_path(1), sealed(b'{"format":1,"lineage":1,"parent":"1-0"}'))
    with pytest.raises(Damaged, match="later parent"):
        weights.newest()


def test_errors_travel_between_processes_with_what_they_name(weights, objects):
    objects.delete(f"{layout.data_prefix(V0, weights.commit(V0).attempt)}/float32/c/0")
    with pytest.raises(Damaged) as caught:
        weights.pull()
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert isinstance(again, StoreError)
    assert (str(again), again.version, again.tensor) == (str(caught.value), V0, "first")
