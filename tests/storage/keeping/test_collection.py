"""What collections remove and keep, when, and what readers see meanwhile."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from storage.errors import Damaged, StoreError, UnknownFormat, VersionMissing
from storage.format import layout
from storage.format.commit import sealed
from storage.keeping import retirement
from storage.keeping.collection import DAMAGED, Collection
from storage.keeping.leases import SWEPT_AFTER_S
from storage.keeping.retention import Retention
from storage.keeping.retirement import Retired, Retirements
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.scripted import Killed, Script, ScriptedStore, put, values, whole

T0 = 1_000_000.0
GRACE = 100.0
LAST = Retention(keep_last=1)
ORPHANED = layout.LONGEST_PUBLISH_S


quick = pytest.mark.parametrize("place", ["local", "memory"], indirect=True)
"""What doesn't depend on the kind of store is tried where requests cost nothing."""


def v(step: int, lineage: int = 0) -> Version:
    return Version(lineage, step)


@pytest.fixture
def script():
    return Script(now=T0)


@pytest.fixture
def weights(place, script):
    return WeightStore.over(ScriptedStore.over(place, script))


def collect(weights, retention=LAST, at=T0, **options) -> Collection:
    weights.objects.script.now = at
    return weights.gc(retention, grace_s=GRACE, now=at, **options)


def data_versions(weights) -> set[str]:
    """The versions that have data, as `v0-00000001`."""
    return {path.split("/")[1].rsplit("-", 1)[0] for path in weights.objects.list("data")}


def test_a_version_goes_in_two_collections_a_grace_period_apart(weights):
    for step in range(4):
        put(weights, v(step))
    commits = {step: weights.commit(v(step)) for step in range(4)}
    first = collect(weights)
    assert (first.retired, first.deleted, first.waiting, first.bytes_freed) == ((v(0), v(1), v(2)), (), (), 0)
    assert first.kept == {v(3): ("newest",)}
    assert weights.versions() == [v(3)] and weights.newest() == v(3)
    with pytest.raises(VersionMissing, match="0-1"):
        weights.pull(v(1))
    for step in range(3):  # one that had begun still gets everything
        assert weights._versioned.tensors(commits[step])["w"].equal(values(v(step)))
    second = collect(weights, at=T0 + GRACE - 1)
    assert (second.retired, second.deleted, second.waiting) == ((), (), (v(0), v(1), v(2)))
    assert len(data_versions(weights)) == 4
    sizes = {info.path: info.bytes for info in weights.objects.infos("data")}
    third = collect(weights, at=T0 + GRACE)
    assert (third.deleted, third.waiting) == ((v(0), v(1), v(2)), ())
    left = {info.path for info in weights.objects.infos("data")}
    assert third.bytes_freed == sum(size for path, size in sizes.items() if path not in left) > 0
    assert {layout.attempt_prefix(path) for path in left} == {layout.data_prefix(v(3), commits[3].attempt)}
    assert weights.objects.list("retired") == [] and whole(weights, v(3))
    with pytest.raises(Damaged, match="is missing"):
        weights._versioned.tensors(commits[1])


@pytest.mark.many_requests
def test_what_a_kept_version_is_stored_as_changes_of_stays(weights):
    for step, base in ((0, None), (1, 0), (2, 1), (3, 2), (4, None)):
        put(weights, v(step), None if base is None else v(base))
    weights.tag("best", v(2))
    first = collect(weights)
    assert first.retired == (v(3),)
    assert first.kept[v(0)] == ("0-2 is stored as changes of it",)
    collect(weights, at=T0 + GRACE)
    assert weights.versions() == [v(0), v(1), v(2), v(4)]
    assert all(whole(weights, version) for version in weights.versions())
    weights.untag("best")
    collect(weights, at=T0 + GRACE)
    collect(weights, at=T0 + 2 * GRACE)
    assert weights.versions() == [v(4)] and data_versions(weights) == {"v0-00000004"}


def test_a_reader_that_had_begun_on_changes_finishes_in_the_grace_period_and_fails_after_it(weights):
    put(weights, v(0))
    put(weights, v(1), v(0))
    put(weights, v(2), v(1))
    commit = weights.commit(v(2))
    put(weights, v(3))
    collect(weights)
    assert weights.versions() == [v(3)]
    assert weights._versioned.tensors(commit)["w"].equal(values(v(2)))
    collect(weights, at=T0 + GRACE)
    with pytest.raises((Damaged, VersionMissing)):
        weights._versioned.tensors(commit)


def test_tags_leases_and_branch_points_hold_versions_until_they_end(weights, script):
    for step in range(5):
        put(weights, v(step))
    weights.tag("best", v(0))
    lease = weights.lease(v(1), 60, "engine 7")
    assert weights.open_lineage(v(2)) == 1
    found = collect(weights)
    assert found.kept == {v(0): ("tag best",), v(1): ("leased by engine 7",), v(2): ("newest", "lineage 1 begins there"), v(4): ("newest",)}
    assert weights.newest() == v(2)
    collect(weights, at=T0 + 59)
    lease.renew()
    assert v(1) in collect(weights, at=T0 + 118).kept
    weights.untag("best")
    put(weights, v(3, 1))
    found = collect(weights, at=T0 + 119)
    assert found.retired == (v(0), v(1), v(2), v(4)) and list(found.kept) == [v(3, 1)]
    assert found.leases == 0
    assert collect(weights, at=T0 + 119 + SWEPT_AFTER_S).leases == 1
    assert weights.objects.list("leases") == []


@quick
@pytest.mark.parametrize("claim", ["tag", "lease", "lineage", "changes"])
@pytest.mark.parametrize("moment", ["write", "delete"])
def test_a_claim_made_while_the_version_goes_is_kept_or_refused_but_never_broken(weights, script, claim, moment):
    for step in range(3):
        put(weights, v(step))
    other = WeightStore.over(ScriptedStore.over((weights.url, weights.objects._options), Script(now=T0)))
    claims = {
        "tag": lambda: other.tag("best", v(1)),
        "lease": lambda: other.lease(v(1), 60),
        "lineage": lambda: other.open_lineage(v(1)),
        "changes": lambda: put(other, v(3), v(1)),
    }

    def before(kind: str, path: str) -> None:
        if kind == moment and path in {layout.retired_path(v(1)), layout.commit_path(v(1))}:
            script.before = None
            claims[claim]()

    script.before = before
    found = collect(weights)
    assert script.before is None
    assert (found.retired, found.restored) == ((v(0),), (v(1),))
    assert found.kept.keys() >= {v(1)}
    assert whole(weights, v(1)) and v(1) in weights.versions()
    if claim == "changes":
        assert whole(weights, v(3))
    again = collect(weights, at=T0 + 59)
    assert v(1) in again.kept and again.retired == (() if claim != "changes" else (v(2),))
    last = collect(weights, at=T0 + GRACE, retention=Retention(keep=frozenset([v(1)])))
    assert v(0) in last.deleted and whole(weights, v(1))


@quick
def test_a_claim_that_comes_too_late_is_refused(weights, script):
    for step in range(2):
        put(weights, v(step))
    other = WeightStore.over(ScriptedStore.over((weights.url, weights.objects._options), Script(now=T0)))
    exists = type(other.objects).exists
    seen = []

    def slow(self, path):
        found = exists(self, path)
        if self is other.objects and not seen:
            seen.append(found)
            collect(weights)
        return found

    type(other.objects).exists = slow
    try:
        for claim in (lambda: other.tag("best", v(0)), lambda: other.lease(v(0), 60)):
            with pytest.raises(VersionMissing, match="0-0"):
                claim()
    finally:
        type(other.objects).exists = exists
    assert seen == [True]
    assert weights.tags() == {} and weights.objects.list("leases") == []


@quick
def test_a_killed_collector_s_version_that_was_claimed_meanwhile_is_put_back_by_the_next(weights, script):
    put(weights, v(0))
    put(weights, v(1))
    other = WeightStore.over(ScriptedStore.over((weights.url, weights.objects._options), Script(now=T0)))
    script.before = lambda kind, path: other.tag("best", v(0)) if (kind, path) == ("delete", layout.commit_path(v(0))) else None
    deleted = type(weights.objects).delete

    def dies(self, path, recursive=False):
        deleted(self, path, recursive)
        if path == layout.commit_path(v(0)):
            raise Killed

    type(weights.objects).delete = dies
    try:
        with pytest.raises(Killed):
            collect(weights)
    finally:
        type(weights.objects).delete = deleted
    script.before = None
    assert weights.versions() == [v(1)]
    assert collect(weights, at=T0 + 10 * GRACE).restored == (v(0),)
    assert weights.resolve("best") == v(0) and whole(weights, v(0))


@quick
def test_a_version_whose_data_is_going_is_not_put_back(weights):
    put(weights, v(0))
    put(weights, v(1))
    collect(weights)
    (retired,) = Retirements(weights.objects).all()
    Retirements(weights.objects)._write(v(0), retired.data, gone=True)
    weights.objects.write(layout.tag_path("late"), sealed(b'{"format":1,"version":"0-0"}'))
    assert not Retirements(weights.objects).restore(retired)
    weights.objects.create(layout.commit_path(v(0)), retired.data)  # one that was killed in the middle of putting it back
    found = collect(weights)
    assert (found.restored, found.deleted) == ((), (v(0),))
    assert weights.versions() == [v(1)] and data_versions(weights) == {"v0-00000001"}


def one_retired(weights) -> Retired:
    """The record of version 0-0, which went when version 1-0 came."""
    put(weights, v(0))
    put(weights, v(0, 1))
    collect(weights)
    (retired,) = Retirements(weights.objects).all()
    return retired


@quick
def test_a_retired_attempt_s_data_goes_when_the_version_was_published_anew(weights):
    retired = one_retired(weights)
    first = retired.commit.attempt
    put(weights, v(0))  # by a trainer of lineage 0 that hasn't heard
    assert not Retirements(weights.objects).restore(retired)
    second = weights.commit(v(0)).attempt
    assert second != first and weights.commit(v(0)).attempt == second
    both = Retention(keep=frozenset([v(0)]))
    assert collect(weights, both).waiting == (v(0),)
    found = collect(weights, both, at=T0 + GRACE)
    assert found.deleted == (v(0),) and found.bytes_freed > 0
    assert whole(weights, v(0)) and weights.commit(v(0)).attempt == second
    assert Retirements(weights.objects).all() == []
    assert [path for path in weights.objects.list("data") if first in path] == []


@quick
def test_what_is_published_anew_beside_a_collection_that_deletes_what_was_before_stays(weights, script):
    retired = one_retired(weights)
    Retirements(weights.objects)._write(v(0), retired.data, gone=True)  # by a collector that was killed then
    put(weights, v(1, 1))
    other = WeightStore.over(ScriptedStore.over((weights.url, weights.objects._options), Script(now=T0)))

    def before(kind: str, path: str) -> None:
        if path == layout.retired_path(v(0, 1)):
            script.before = None
            put(other, v(0))

    script.before = before
    found = collect(weights, Retention(keep=frozenset([v(0)])), at=T0 + 1)
    assert script.before is None and found.retired == (v(0, 1),)
    assert v(0) in weights.versions() and whole(weights, v(0))


@quick
def test_what_was_published_anew_stays_when_the_record_of_what_was_before_goes_meanwhile(weights, script):
    retired = one_retired(weights)
    put(weights, v(0))
    Retirements(weights.objects).forget(retired)
    assert not Retirements(weights.objects).restore(retired)
    assert whole(weights, v(0))


@quick
def test_a_collector_that_was_held_up_after_its_record_leaves_the_version(weights, monkeypatch):
    put(weights, v(0))
    attempt = weights.commit(v(0)).attempt
    times = iter([0.0, retirement.STALL_S + 1])
    monkeypatch.setattr(retirement, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert not Retirements(weights.objects).retire(v(0), attempt)
    assert whole(weights, v(0))


@quick
def test_a_record_of_a_version_that_exists_goes_once_it_is_old(weights):
    put(weights, v(0))
    put(weights, v(1))
    collect(weights)
    (retired,) = Retirements(weights.objects).all()
    assert Retirements(weights.objects).restore(retired)
    keep = Retention(keep=frozenset([v(0)]))
    collect(weights, keep)
    assert weights.objects.list("retired") == ["retired/0-0.json"]
    collect(weights, keep, at=T0 + GRACE)
    assert weights.objects.list("retired") == [] and whole(weights, v(0))


def test_data_of_dead_attempts_goes_once_it_is_older_than_the_longest_publish(weights, script):
    put(weights, v(0))
    script.left = 3
    with pytest.raises(Killed):
        put(weights, v(1))
    script.left = None
    weights.objects.write("probe-" + "0" * 32, b"probe")
    weights.objects.write("clock/" + "0" * 32, b"clock")
    weights.objects.write("data/notes.txt", b"not ours")
    script.now = T0 + 10
    (prefix,) = {layout.attempt_prefix(path) for path in weights.objects.list("data") if "v0-00000001" in path}
    weights.objects.write(f"{prefix}/late", b"late")
    assert collect(weights, at=T0 + ORPHANED - 1).orphans == ()
    early = collect(weights, at=T0 + ORPHANED)
    assert [orphan.path.split("/")[0] for orphan in early.orphans] == ["clock", "probe-" + "0" * 32]
    found = collect(weights, at=T0 + ORPHANED + 10)
    assert [orphan.path for orphan in found.orphans] == [prefix]
    assert found.bytes_freed == found.orphans[0].bytes > 4
    assert [path for path in weights.objects.list("data") if "v0-00000000" not in path] == ["data/notes.txt"]
    assert whole(weights, v(0))


def test_a_local_writer_s_temporary_file_goes_once_it_is_old(tmp_path):
    weights = WeightStore(str(tmp_path))
    put(weights, v(0))
    dead, alive = ".tmp-" + "0" * 32, ".tmp-" + "1" * 32
    old, young = tmp_path / "commits" / dead, tmp_path / "data" / alive
    for path, age in ((old, ORPHANED + 60), (young, 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    assert [orphan.path for orphan in weights.gc(LAST, grace_s=GRACE).orphans] == [f"commits/{dead}"]
    assert not old.exists() and young.exists() and whole(weights, v(0))


def test_other_programs_files_in_the_same_folder_stay_whatever_their_age(tmp_path):
    weights = WeightStore(str(tmp_path))
    put(weights, v(0))
    foreign = [".tmp-draft.odt", "notes/.tmp-" + "0" * 32, "probe-results.csv", "probe-2024/a.txt", "clock/face.svg", "files/a", "data/v1/x"]
    for name in foreign:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"precious")
        os.utime(tmp_path / name, (1.0, 1.0))
    assert weights.gc(LAST, grace_s=0).orphans == ()
    assert all((tmp_path / name).read_bytes() == b"precious" for name in foreign)


def test_a_collection_where_no_versions_are_writes_nothing(tmp_path):
    (tmp_path / "probe-notes").write_bytes(b"mine")
    for folder in (tmp_path, tmp_path / "mistyped"):
        assert WeightStore(str(folder)).gc(LAST, grace_s=0) == Collection()
    assert os.listdir(tmp_path) == ["probe-notes"]


@quick
def test_files_go_when_no_version_refers_to_them_and_nobody_publishes(weights, script):
    put(weights, v(0), files={"config.json": b"shared", "old.json": b"old"})
    put(weights, v(1), files={"config.json": b"shared", "new.json": b"new"})
    assert len(weights.objects.list("files")) == 3
    collect(weights)
    collect(weights, at=T0 + GRACE)
    assert len(weights.objects.list("files")) == 3
    script.now = T0 + ORPHANED
    script.left = 2
    with pytest.raises(Killed):
        put(weights, v(2))
    script.left = None
    assert collect(weights, at=T0 + ORPHANED).orphans == ()
    found = collect(weights, at=T0 + 2 * ORPHANED)
    assert [orphan.bytes for orphan in found.orphans if orphan.is_file] == [3]
    assert weights.verify().sound and len(weights.objects.list("files")) == 2


@quick
def test_a_file_that_a_publisher_takes_for_its_own_at_that_moment_stays(weights, script):
    put(weights, v(0), files={"config.json": b"config"})
    put(weights, v(1))
    collect(weights)
    collect(weights, at=T0 + GRACE)
    (file,) = weights.objects.list("files")
    other = WeightStore.over(ScriptedStore.over((weights.url, weights.objects._options), Script(now=T0 + ORPHANED)))

    def before(kind: str, path: str) -> None:
        if (kind, path) == ("delete", file):
            script.before = None
            put(other, v(2), files={"config.json": b"config"})

    script.before = before
    found = collect(weights, at=T0 + ORPHANED)
    assert script.before is None and found.orphans == ()
    assert weights.verify(v(2)).sound


def test_a_dry_run_writes_nothing_and_says_what_would_go(weights, script):
    for step in range(3):
        put(weights, v(step))
    script.changes.clear()
    planned = collect(weights, dry_run=True)
    assert script.changes == [] and planned.dry_run
    done = collect(weights)
    assert (planned.retired, planned.kept) == (done.retired, done.kept)
    planned = collect(weights, at=T0 + GRACE, dry_run=True)
    done = collect(weights, at=T0 + GRACE)
    assert (planned.deleted, planned.bytes_freed) == (done.deleted, done.bytes_freed) and done.bytes_freed > 0


def test_the_time_is_asked_of_the_store_and_nothing_of_the_question_stays(place, monkeypatch):
    weights = WeightStore(*place)
    put(weights, v(0))
    put(weights, v(1))
    monkeypatch.setattr("storage.keeping.collection.time", None)  # this machine's clock doesn't count
    assert weights.gc(LAST, grace_s=3600).retired == (v(0),)
    assert weights.gc(LAST, grace_s=3600).waiting == (v(0),)
    assert weights.gc(LAST, grace_s=0).deleted == (v(0),)
    assert weights.objects.list("clock") == []


@quick
def test_a_version_whose_commit_is_damaged_stays_with_its_data_and_is_named(weights):
    put(weights, v(0))
    put(weights, v(1))
    path = layout.commit_path(v(0))
    weights.objects.write(path, weights.objects.read(path)[:-5])
    for at in (T0, T0 + GRACE, T0 + 2 * ORPHANED):
        found = collect(weights, at=at)
        assert (found.kept[v(0)], found.retired, found.orphans) == ((DAMAGED,), (), ())
    assert data_versions(weights) == {"v0-00000000", "v0-00000001"}


@quick
def test_a_version_of_a_later_format_stops_the_collection_before_anything_goes(weights):
    for step in range(3):
        put(weights, v(step))
    weights.objects.write(layout.commit_path(v(1)), sealed(b'{"format":2}'))
    with pytest.raises(UnknownFormat, match="newer"):
        collect(weights)
    assert len(weights.versions()) == 3


@quick
@pytest.mark.parametrize("record", ["tags/best.json", "leases/0-0-x.json", "retired/0-0.json"])
def test_a_damaged_record_stops_the_collection_since_what_it_keeps_is_unknown(weights, record):
    put(weights, v(0))
    put(weights, v(1))
    weights.objects.write(record, b'{"format":1,"version":"0-0"}')
    with pytest.raises(Damaged, match=record):
        collect(weights)
    assert len(weights.versions()) == 2


@quick
def test_an_empty_store_and_a_wrong_grace_period(weights):
    assert collect(weights).kept == {}
    with pytest.raises(ValueError, match="grace_s"):
        weights.gc(LAST, grace_s=-1.0)
    with pytest.raises(StoreError):
        WeightStore("/dev/null").gc(LAST, grace_s=1.0)
