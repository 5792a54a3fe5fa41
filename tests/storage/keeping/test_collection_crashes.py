"""Collections that are killed at any write or deletion, and many at once beside publishers, readers and people who tag."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.errors import StoreError, VersionMissing
from storage.format import layout
from storage.keeping.retention import Retention
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.scripted import Killed, Script, ScriptedStore, put, whole

T0 = 1_000_000.0
GRACE = 100.0
LAST = Retention(keep_last=1)
LATE = T0 + layout.LONGEST_PUBLISH_S + 1000


def v(step: int) -> Version:
    return Version(0, step)


KEPT = [v(0), v(1), v(2), v(6)]


def history(place, number: int) -> WeightStore:
    """0-0, 0-1 and 0-2 are a chain whose end has a tag, 0-4 is changes of 0-3, 0-6 the newest; a dead attempt's data lies about."""
    script = Script(now=T0)
    weights = WeightStore.over(ScriptedStore.over((f"{place[0]}/{number}", place[1]), script))
    for step, base in ((0, None), (1, 0), (2, 1), (3, None), (4, 3), (5, None), (6, None)):
        put(weights, v(step), None if base is None else v(base), {"config.json": b"old" if step in {3, 4} else b"new"})
    weights.tag("best", v(2))
    weights.lease(v(6), 10)
    weights.objects.write(f"{layout.data_prefix(v(7), '0' * 32)}/float32/c/0", b"dead")
    return weights


def check(weights: WeightStore) -> None:
    existing = weights.versions()
    assert set(KEPT) <= set(existing) and weights.newest() == v(6) and weights.resolve("best") == v(2)
    assert all(whole(weights, version) for version in existing)
    assert weights.verify().sound


def only_the_kept_are_left(weights: WeightStore) -> None:
    assert weights.versions() == KEPT
    left = {layout.attempt_prefix(path) for path in weights.objects.list("data")}
    assert left == {layout.data_prefix(version, weights.commit(version).attempt) for version in KEPT}
    assert {path.split("/")[0] for path in weights.objects.list()} == {"commits", "data", "files", "tags"}
    assert len(weights.objects.list("files")) == 1


@pytest.mark.parametrize("place", ["local", "memory"], indirect=True)
@pytest.mark.parametrize("which", ["first", "second", "late"])
def test_a_collection_killed_at_any_change_loses_no_kept_version_and_the_next_finishes(place, which):
    """The first one retires versions, the second deletes their data, the late one sweeps what the dead left."""
    at = {"first": T0, "second": T0 + GRACE, "late": LATE}
    left = 0
    while True:
        weights = history(place, left)
        script = weights.objects.script
        for name in at:
            script.now = at[name]
            if name == which:
                break
            weights.gc(LAST, grace_s=GRACE, now=script.now)
        script.left = left
        try:
            weights.gc(LAST, grace_s=GRACE, now=script.now)
        except Killed:
            killed = True
        else:
            killed = False
        script.left = None
        check(weights)
        for later in (script.now, script.now + GRACE, LATE, LATE + GRACE):
            script.now = later
            weights.gc(LAST, grace_s=GRACE, now=later)
            check(weights)
        only_the_kept_are_left(weights)
        if not killed:
            break
        left += 1
    # A record and a deletion for each of three; a mark, three objects and a record for each, and a lease; dead data and a file.
    assert left == {"first": 6, "second": 3 * (1 + 3 + 1) + 1, "late": 2}[which]


@pytest.mark.many_requests
def test_many_collections_at_once_beside_publishers_readers_and_tags(place):
    """The virtual time stands still in each round, so whoever began in it has the grace period."""
    script = Script(now=T0)
    stores = [WeightStore.over(ScriptedStore.over(place, script)) for _ in range(6)]
    publisher, *others = stores
    put(publisher, v(0))
    wrong: list[str] = []
    read: list[Version] = []

    def publish(start: int) -> None:
        for step in range(start, start + 4):
            put(publisher, v(step), v(step - 1) if step % 4 != 1 else None)

    def collect(weights: WeightStore) -> None:
        for _ in range(3):
            weights.gc(Retention(keep_last=2), grace_s=GRACE, now=script.now)

    def read_leased(weights: WeightStore) -> None:
        for _ in range(4):
            try:
                lease = weights.lease("newest", 50)
            except VersionMissing:
                continue
            with lease:
                read.append(lease.version)
                if not whole(weights, lease.version):
                    wrong.append(f"{lease.version} under a lease")

    def read_unleased(weights: WeightStore) -> None:
        for _ in range(4):
            version = weights.resolve(None)
            try:
                if not whole(weights, version):
                    wrong.append(f"{version}")
            except VersionMissing:  # retired between the two requests
                continue

    def tag(weights: WeightStore) -> None:
        for _ in range(4):
            try:
                weights.tag("best", "newest")
            except VersionMissing:
                continue
            if not whole(weights, weights.resolve("best")):
                wrong.append("the tagged one")

    for number in range(3):
        work = [collect, collect, read_leased, read_unleased, tag]
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(publish, 4 * number + 1), *(pool.submit(job, weights) for job, weights in zip(work, others, strict=True))]
        for future in futures:
            future.result()
        script.now = T0 + (number + 1) * GRACE
    assert wrong == [] and read
    assert publisher.newest() == v(12)
    for _ in range(3):
        script.now += layout.LONGEST_PUBLISH_S + GRACE
        found = publisher.gc(LAST, grace_s=GRACE, now=script.now)
    existing = publisher.versions()
    assert existing == list(found.kept) and {v(12), publisher.tags()["best"]} <= set(existing)
    assert all(whole(publisher, version) for version in existing)
    report = publisher.verify()
    assert report.sound and (report.orphans, report.retired) == ((), ())


def test_a_reader_without_a_lease_after_the_grace_period_gets_an_error_and_never_other_values(place):
    weights = WeightStore.over(ScriptedStore.over(place, Script(now=T0)))
    for step in range(3):
        put(weights, v(step), v(step - 1) if step else None)
    commits = [weights.commit(v(step)) for step in range(3)]
    put(weights, v(3))
    weights.gc(LAST, grace_s=GRACE, now=T0)
    (prefix,) = {layout.attempt_prefix(path) for path in weights.objects.list("data") if "v0-00000001" in path} - {None}
    for path in weights.objects.list(prefix):  # a collector at work
        weights.objects.delete(path)
        for commit in commits[1:]:
            try:
                assert weights._versioned.tensors(commit)["w"][commit.version.step] == 1e6 + commit.version.step
            except StoreError as error:
                assert "missing" in str(error) or "gone" in str(error)
