"""What verify finds, names and reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from storage.arrays.packing import pack
from storage.checkpoints import CheckpointStore
from storage.errors import StoreUnreachable, UnknownTag, VersionMissing
from storage.format import layout
from storage.format.commit import sealed
from storage.keeping.retention import Retention
from storage.keeping.verification import Damage
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.scripted import Script, ScriptedStore, put

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)


@pytest.fixture
def weights(place):
    """Version 0-0 of many chunks, with tied and empty tensors, a document and two files; 0-1, and 0-2 as changes of that."""
    weights = WeightStore(*place)
    state = {f"t{i}": torch.arange(100.0) + i for i in range(8)} | {"empty": torch.zeros(0), "half": torch.ones(300).bfloat16()}
    state["tied"] = state["t3"]
    packed = pack(state, chunk_bytes=1000)
    files = {"config.json": b"{}", "big.bin": bytes(range(256)) * 40}
    weights._versioned.put(V0, packed, documents={"said": b'{"a":1}'}, files=files)
    put(weights, V1, files={"config.json": b"{}"})
    put(weights, V2, V1)
    return weights


def folder(weights: WeightStore, version: Version) -> str:
    return layout.data_prefix(version, weights.commit(version).attempt)


def test_a_sound_store_is_read_whole_and_nothing_is_found(weights):
    seen = []
    found = weights.verify(progress=lambda done, total: seen.append((done, total)))
    assert found.sound and found.versions == (V0, V1, V2)
    sizes = {info.path: info.bytes for info in weights.objects.infos()}
    assert found.bytes == sum(size for path, size in sizes.items() if path.startswith(("data/", "files/")))
    assert seen[-1] == (found.bytes, found.bytes) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (found.orphans, found.retired) == ((), ())


def test_one_version_is_verified_with_what_its_data_needs_and_no_other(weights):
    weights.objects.delete(f"{folder(weights, V0)}/float32/c/0")
    assert weights.verify("0-2").versions == (V1, V2) and weights.verify("0-2").sound
    assert not weights.verify("0-0").sound
    weights.objects.delete(f"{folder(weights, V1)}/float32/c/0")
    (damage,) = weights.verify("0-2").damages
    assert (damage.version, damage.tensors, damage.reason) == (V1, ("w",), "is missing")
    with pytest.raises(VersionMissing, match="0-9"):
        weights.verify("0-9")
    with pytest.raises(UnknownTag):
        weights.verify("best")


@pytest.mark.parametrize("place", ["local", "memory"], indirect=True)
def test_a_flipped_bit_in_any_object_is_found_and_named_by_its_path(weights):
    weights.tag("best", V0)
    weights.open_lineage(V0)
    paths = [path for path in weights.objects.list() if not path.endswith("zarr.json")] + [f"{folder(weights, V0)}/float32/zarr.json"]
    assert len(paths) > 15
    with weights.lease(V0, 60):
        paths += weights.objects.list("leases")
        for path in paths:
            good = weights.objects.read(path)
            for at in {0, len(good) // 2, len(good) - 1}:
                weights.objects.write(path, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
                assert path in {damage.path for damage in weights.verify().damages}, (path, at)
            weights.objects.write(path, good)
    assert weights.verify().sound


@pytest.mark.parametrize("place", ["local", "memory"], indirect=True)
def test_every_missing_short_or_long_object_is_found(weights):
    for path in weights.objects.list("data"):
        good = weights.objects.read(path)
        weights.objects.delete(path)
        assert [(damage.path, damage.reason) for damage in weights.verify().damages] == [(path, "is missing")]
        for bad in (good[:-1], good + b"\0", b""):
            weights.objects.write(path, bad)
            (damage,) = weights.verify().damages
            assert damage.path == path and "another size" in damage.reason
        weights.objects.write(path, good)
    assert weights.verify().sound


def test_the_tensors_of_a_damaged_chunk_are_named_and_other_names_for_them(weights):
    path = f"{folder(weights, V0)}/float32/c/1"  # 800 values in 4 chunks of 200
    weights.objects.write(path, b"\0" * 804)
    weights.objects.delete(f"{folder(weights, V0)}/bfloat16/c/0")
    found = weights.verify("0-0")
    assert found.damages == (
        Damage(f"{folder(weights, V0)}/bfloat16/c/0", "is missing", V0, ("half",)),
        Damage(path, "has changed bytes", V0, ("t2", "t3", "tied")),
    )


def test_a_damaged_stream_of_changes_names_the_tensors_that_changed(place):
    weights = WeightStore(*place)
    put(weights, V1)
    put(weights, V2, V1)
    commit = weights.commit(V2)
    (stream,) = commit.arrays
    path = f"{folder(weights, V2)}/{stream}/c/0"
    good = weights.objects.read(path)
    weights.objects.write(path, bytes([good[0] ^ 1]) + good[1:])
    (damage,) = weights.verify().damages
    assert (damage.path, damage.version, damage.tensors) == (path, V2, ("w",))


def test_a_file_that_versions_share_is_damage_to_each(weights):
    key = weights.commit(V1).files["config.json"].key
    weights.objects.write(key, b"[]")
    assert weights.verify().damages == (Damage(key, "has changed bytes", V0), Damage(key, "has changed bytes", V1))


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.rename(f"{path}-elsewhere")
    path.symlink_to(f"{path}-elsewhere")


@pytest.mark.parametrize("place", ["local"], indirect=True)
@pytest.mark.parametrize("put_instead", [put_folder, put_link, put_pipe])
def test_what_is_in_the_place_of_an_object_and_cannot_be_read_is_damage_of_that_object(weights, put_instead):
    weights.tag("best", V0)
    (document,) = (path for path in weights.objects.list("data") if path.endswith("said.json"))
    (file,) = (entry.key for name, entry in weights.commit(V0).files.items() if name == "big.bin")
    paths = [f"{folder(weights, V0)}/float32/c/1", f"{folder(weights, V1)}/float32/c/0", document, file]
    paths += ["tags/best.json", layout.commit_path(V2)] if put_instead is put_link else []
    for path in paths:
        put_instead(Path(weights.url) / path)
    found = weights.verify()
    assert sorted({damage.path for damage in found.damages}) == sorted(paths)
    assert all("can't be read" in damage.reason for damage in found.damages)
    assert {damage.tensors for damage in found.damages if damage.path == paths[0]} == {("t2", "t3", "tied")}
    if put_instead is put_link:
        assert [damage.path for damage in weights.verify("0-2").damages] == [layout.commit_path(V2)]


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_store_that_goes_away_as_a_whole_is_no_damage(weights, monkeypatch):
    def gone(self, path, *_args):
        raise StoreUnreachable(f"{path}: no route to host")

    monkeypatch.setattr(type(weights.objects), "read_into", gone)
    assert len({damage.path for damage in weights.verify().damages}) > 10  # while the commits can be read
    read, left = type(weights.objects).read, iter(range(3))
    monkeypatch.setattr(type(weights.objects), "read", lambda self, path: read(self, path) if next(left, None) is not None else gone(self, path))
    with pytest.raises(StoreUnreachable, match="data/"):
        weights.verify()
    with pytest.raises(StoreUnreachable, match="commits/"):
        weights.verify()


def test_a_broken_chain_names_the_version_that_lost_it(weights):
    weights.objects.delete(layout.commit_path(V1))
    found = weights.verify()
    assert found.damages == (Damage(layout.commit_path(V1), "is missing, and 0-2 is stored as changes of it", V2, ("w",)),)
    assert [orphan.path for orphan in found.orphans] == [
        next(p for p in {"/".join(x.split("/")[:2]) for x in weights.objects.list("data")} if "00001-" in p)
    ]


def test_a_tag_on_nothing_and_a_later_format_are_told(weights):
    weights.objects.write(layout.tag_path("lost"), sealed(b'{"format":1,"version":"0-7"}'))
    weights.objects.write(layout.commit_path(Version(0, 3)), sealed(b'{"format":2}'))
    tag, commit = sorted(weights.verify().damages, key=lambda damage: damage.path, reverse=True)
    assert (tag.path, tag.version) == ("tags/lost.json", None) and "0-7" in tag.reason
    assert commit.version == Version(0, 3) and "newer" in commit.reason


def test_orphans_and_retired_versions_are_told_and_are_no_damage(place):
    script = Script(now=1000.0)
    weights = WeightStore.over(ScriptedStore.over(place, script))
    put(weights, V0)
    put(weights, V1)
    weights.gc(Retention(), grace_s=100, now=1000.0)
    prefix = layout.data_prefix(V2, "0" * 32)
    weights.objects.write(f"{prefix}/float32/c/0", b"half")
    weights.objects.write(layout.file_key("0" * 64), b"nobody's")
    found = weights.verify()
    assert found.sound and found.versions == (V1,) and found.retired == (V0,)
    assert [(orphan.path, orphan.bytes) for orphan in found.orphans] == [(prefix, 4), (layout.file_key("0" * 64), 8)]


def test_a_version_that_is_collected_meanwhile_is_no_damage(place):
    weights = WeightStore.over(ScriptedStore.over(place, Script(now=1000.0)))
    put(weights, V0)
    put(weights, V1)
    collected = []

    def progress(done: int, total: int) -> None:
        if not collected:
            collected.append(weights.gc(Retention(), grace_s=0, now=1000.0))
            collected.append(weights.gc(Retention(), grace_s=0, now=1000.0))

    found = weights.verify(progress=progress)
    assert collected[1].deleted == (V0,)
    assert found.sound and found.versions == (V1,)


def test_a_list_of_block_checksums_that_is_wrong_is_found(weights):
    path = layout.commit_path(V0)
    commit = json.loads(weights.objects.read(path))
    del commit["sha256"]
    chunks = commit["arrays"]["float32"]["chunks"]
    chunks[0]["blocks"] = chunks[1]["blocks"]
    weights.objects.write(path, sealed(json.dumps(commit, separators=(",", ":")).encode()))
    (damage,) = weights.verify().damages
    assert "blocks" in damage.reason and damage.tensors == ("t0", "t1")


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_verifying_holds_a_few_chunks_and_not_the_state(place, monkeypatch):
    weights = WeightStore(*place)
    weights._versioned.put(V0, pack({"w": torch.zeros(1 << 20)}, chunk_bytes=1 << 16))
    asked = []
    read_into = type(weights.objects).read_into

    def counted(self, path, buffer, start=0, seen=None):
        asked.append(sum(map(len, buffer)) if isinstance(buffer, list) else len(buffer))
        return read_into(self, path, buffer, start, seen)

    monkeypatch.setattr(type(weights.objects), "read_into", counted)
    assert weights.verify().sound
    assert len(asked) >= 64 and max(asked) <= (1 << 16) + 4


def test_a_checkpoint_is_verified_with_its_documents(place):
    checkpoints = CheckpointStore(*place)
    checkpoints.save(1, 0, arrays={"x": torch.ones(5)}, documents={"ledger": [1, 2]})
    assert checkpoints.verify().sound and checkpoints.verify("newest").versions == (V1,)
    objects = checkpoints._versioned.store
    (path,) = [path for path in objects.list() if path.endswith("documents/ledger.json")]
    objects.write(path, b"[1,3]")
    assert checkpoints.verify("0-1").damages == (Damage(path, "has changed bytes", V1),)
    with pytest.raises(VersionMissing):
        checkpoints.verify("0-2")
