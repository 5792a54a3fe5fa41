"""Versions from one store to another: byte for byte, on any two kinds of store, whatever breaks off on the way."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch

from storage import copying
from storage.copying import copy_lineages, copy_tags, copy_version
from storage.errors import Damaged, StoreError, UnsafePath, VersionDiffers, VersionMissing
from storage.format import layout
from storage.objects import paths
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore

Place = tuple[str, dict[str, Any]]
FILES = {"config.json": b'{"model_type": "x"}', "tokenizer.json": b"{}"}


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shared = torch.randn(50, generator=generator).to(torch.bfloat16)
    return {"w": torch.randn(30, 4, generator=generator), "a": shared, "b": shared, "ids": torch.arange(7), "none": torch.zeros(0, 3)}


def published(store: WeightStore, *versions: Version) -> None:
    for version in versions:
        store.publish(state(version.step), version=version, metadata={"step": version.step}, files=FILES).result()


def held(store: WeightStore) -> dict[str, bytes]:
    return {path: store.objects.read(path) for path in store.objects.list() if not path.startswith(paths.CLOCK)}


@pytest.fixture
def store() -> WeightStore:
    return WeightStore(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def other(place: Place) -> WeightStore:
    return WeightStore(*place)


@pytest.fixture
def changed(tmp_path: Path) -> WeightStore:
    """A store whose newest version is stored as what changed since the one before it."""
    store = WeightStore(str(tmp_path / "changed"), full_every=4)
    weights = {"w": torch.randn(200_000, generator=torch.Generator().manual_seed(0))}
    for step in range(3):
        weights["w"][step * 10 : step * 10 + 5] += 1e-3
        store.publish({name: tensor.clone() for name, tensor in weights.items()}, version=Version(0, step), files=FILES).result()
    assert [store.commit(v).base for v in store.versions()] == [None, Version(0, 0), Version(0, 1)]
    return store


def test_a_copy_has_the_same_bytes_under_the_same_names_both_ways(store: WeightStore, other: WeightStore) -> None:
    published(store, Version(0, 3))
    assert copy_version(store, Version(0, 3), other) == Version(0, 3)
    assert held(other) == held(store)
    assert other.verify().sound
    back = WeightStore(f"memory://{uuid.uuid4().hex}")
    copy_version(other, Version(0, 3), back)
    assert held(back) == held(store)
    assert torch.equal(back.pull()["w"], state(3)["w"]) and back.file(Version(0, 3), "config.json") == FILES["config.json"]


def test_only_what_was_asked_for_is_copied_and_a_second_time_writes_nothing(
    store: WeightStore, dying: Callable[[int], Any], other: WeightStore
) -> None:
    published(store, Version(0, 1), Version(0, 2))
    copy_version(store, Version(0, 2), other)
    assert other.versions() == [Version(0, 2)]
    copy_version(store, Version(0, 2), WeightStore.over(dying(0)))


def test_a_version_that_is_stored_as_changes_brings_what_it_needs(changed: WeightStore, store: WeightStore) -> None:
    heard: list[tuple[int, int]] = []
    copy_version(changed, Version(0, 2), store, progress=lambda *told: heard.append(told))
    assert store.versions() == [Version(0, 0), Version(0, 1), Version(0, 2)]
    assert torch.equal(store.pull()["w"], changed.pull()["w"])
    assert store.verify().sound and held(store) == held(changed)
    assert all(done <= total for done, total in heard) and heard[-1][0] == heard[-1][1]


def test_a_full_copy_needs_no_other_version(changed: WeightStore, store: WeightStore) -> None:
    assert copy_version(changed, Version(0, 2), store, full=True) == Version(0, 2)
    assert store.versions() == [Version(0, 2)]
    commit = store.commit(Version(0, 2))
    assert commit.base is None and set(commit.files) == set(FILES)
    assert torch.equal(store.pull()["w"], changed.pull()["w"])
    copy_version(changed, Version(0, 2), store, full=True)
    with pytest.raises(VersionDiffers):
        copy_version(changed, Version(0, 2), store)


def test_another_version_of_that_number_is_never_touched(store: WeightStore, other: WeightStore, changed: WeightStore) -> None:
    published(store, Version(0, 2))
    other.publish({"w": torch.ones(1)}, version=Version(0, 2)).result()
    before = held(other)
    for full, source in ((False, store), (True, store), (True, changed)):
        with pytest.raises(VersionDiffers, match=r"another version 0-2"):
            copy_version(source, Version(0, 2), other, full=full)
    assert held(other) == before


def test_one_that_wins_the_race_is_found_out_at_the_commit(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    published(store, Version(0, 2))
    target = WeightStore(f"memory://{uuid.uuid4().hex}")
    create = target.objects.create

    def late(path: str, data: bytes) -> bool:
        if path.startswith(layout.COMMITS) and not target.versions():
            create(path, b"another one's")
        return create(path, data)

    monkeypatch.setattr(target.objects, "create", late)
    with pytest.raises(VersionDiffers):
        copy_version(store, Version(0, 2), target)


def test_a_copy_that_breaks_off_anywhere_shows_nothing_and_goes_on_where_it_was(
    changed: WeightStore, place: Place, dying: Callable[[int], Any], killed: type
) -> None:
    whole = WeightStore(*place)
    broke_off = 0
    for writes in range(30):
        try:
            copy_version(changed, Version(0, 1), WeightStore.over(dying(writes)))
        except killed:
            broke_off += 1
            assert all(whole.verify(version).sound for version in whole.versions())
        else:
            break
    assert broke_off > 4
    assert whole.verify().sound and torch.equal(whole.pull()["w"], changed.pull(Version(0, 1))["w"])


def test_a_copy_that_goes_on_writes_only_what_is_not_there(store: WeightStore, dying: Callable[[int], Any], killed: type, place: Place) -> None:
    published(store, Version(0, 0))
    with pytest.raises(killed):
        copy_version(store, Version(0, 0), WeightStore.over(dying(3)))
    there = {info.path: info.modified for info in ObjectStore(*place).infos(layout.DATA)}
    assert len(there) == 3
    target = WeightStore(*place)
    written: list[str] = []
    write = target.objects.write

    def recorded(path: str, data: Any) -> None:
        written.append(path)
        write(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.objects, "write", recorded)
        copy_version(store, Version(0, 0), target)
    assert written and not there.keys() & set(written)
    assert target.verify().sound


def test_what_an_earlier_copy_left_damaged_or_too_old_is_written_again(store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(store, Version(0, 0))
    target = WeightStore(str(tmp_path / "target"))
    copy_version(store, Version(0, 0), target)
    good = held(target)
    target.objects.delete("commits/0-00000000.json")
    (chunk,) = [p for p in target.objects.list() if p.endswith("float32/c/0")]
    target.objects.write(chunk, b"\0" * len(good[chunk]))
    copy_version(store, Version(0, 0), target)
    assert held(target) == good
    target.objects.delete("commits/0-00000000.json")
    written: list[str] = []
    write = ObjectStore.write
    monkeypatch.setattr(ObjectStore, "write", lambda self, path, data: (written.append(path), write(self, path, data))[1])
    monkeypatch.setattr(copying, "LONGEST_S", -10.0)
    with pytest.raises(StoreError, match="took more than"):
        copy_version(store, Version(0, 0), target)
    assert chunk in written and target.versions() == []


def test_damage_in_the_source_is_found_on_the_way_and_names_the_object(store: WeightStore) -> None:
    published(store, Version(0, 0))
    for path in store.objects.list():
        good = store.objects.read(path)
        if path.startswith(("commits/", "probe")):
            continue
        zeros = bytes(max(0, len(good) - 4))  # with the right checksum of their own
        for bad in (good[:-1] + bytes([good[-1] ^ 1]), good[:-1], zeros + google_crc32c.value(zeros).to_bytes(4, "little"), None):
            store.objects.delete(path) if bad is None else store.objects.write(path, bad)
            target = WeightStore(f"memory://{uuid.uuid4().hex}")
            with pytest.raises(Damaged, match=path):
                copy_version(store, Version(0, 0), target)
            assert target.versions() == []
        store.objects.write(path, good)
    with pytest.raises(VersionMissing):
        copy_version(store, Version(0, 5), WeightStore(f"memory://{uuid.uuid4().hex}"))


def test_a_missing_base_is_damage_of_the_source(changed: WeightStore, store: WeightStore) -> None:
    changed.objects.delete("commits/0-00000000.json")
    with pytest.raises(Damaged, match="leads to version 0-0, which is gone"):
        copy_version(changed, Version(0, 2), store)
    assert store.versions() == []


def test_lineages_and_tags_go_along_so_that_the_newest_is_the_same(store: WeightStore, other: WeightStore) -> None:
    published(store, Version(0, 0), Version(0, 1))
    assert store.open_lineage(Version(0, 0)) == 1
    store.tag("best", Version(0, 1))
    store.tag("start", Version(0, 0))
    for version in store.versions():
        copy_version(store, version, other)
    assert other.newest() == Version(0, 1)
    copy_lineages(store, other)
    assert other.newest() == store.newest() == Version(0, 0)
    other.tag("best", Version(0, 0))
    assert copy_tags(store, other, [Version(0, 1)]) == {"best": Version(0, 1)}
    assert other.tags() == {"best": Version(0, 1)}
    copy_lineages(store, other)


def test_a_lineage_that_branched_off_elsewhere_is_refused(store: WeightStore, other: WeightStore) -> None:
    for one, parent in ((store, Version(0, 0)), (other, Version(0, 1))):
        published(one, Version(0, 0), Version(0, 1))
        one.open_lineage(parent)
    with pytest.raises(VersionDiffers, match="another version 1-0"):
        copy_lineages(store, other)


def test_a_commit_that_names_objects_outside_is_refused(store: WeightStore, other: WeightStore) -> None:
    from dataclasses import replace

    from storage.format.commit import encode
    from storage.format.index import ObjectEntry

    published(store, Version(0, 0))
    commit = store.commit(Version(0, 0))
    hostile = replace(commit, files={"config.json": ObjectEntry("../../secret", 3, "0" * 64)})
    store.objects.write("commits/0-00000000.json", encode(hostile))
    with pytest.raises((Damaged, UnsafePath)):
        copy_version(store, Version(0, 0), other)
    assert other.objects.list() == []
