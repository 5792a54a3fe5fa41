"""Random publishes, tags, leases, lineages, collections, crashes and time: no kept version is lost, and all else is gone in the end."""

from __future__ import annotations

import uuid
from typing import Any

import fsspec
import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage.errors import VersionMissing, VersionPassed, VersionTaken
from storage.format import layout
from storage.keeping.leases import SWEPT_AFTER_S, Lease
from storage.keeping.retention import Retention
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.scripted import Killed, Script, ScriptedStore, put, whole

GRACE = 100.0
T0 = 1_000_000.0


class Keeping(RuleBasedStateMachine):
    """What the model knows: the tags and leases that were given, and which lineage is the newest."""

    @initialize()
    def open(self) -> None:
        self.root = f"/{uuid.uuid4().hex}"
        self.place: tuple[str, dict[str, Any]] = (f"memory:/{self.root}", {})
        self.script = Script(now=T0)
        self.weights = WeightStore.over(ScriptedStore.over(self.place, self.script))
        other = ScriptedStore.over(self.place, Script(now=T0, times=self.script.times))
        self.others = WeightStore.over(other)
        self.tags: dict[str, Version] = {}
        self.leases: list[tuple[Lease, float]] = []
        self.given = False  # whether a killed collector may have left something to put back

    @property
    def now(self) -> float:
        assert self.script.now is not None
        return self.script.now

    def pick(self, data: st.DataObject) -> Version | None:
        versions = self.weights.versions()
        return data.draw(st.sampled_from(versions)) if versions else None

    def publish(self, weights: WeightStore, data: st.DataObject) -> None:
        """The next version of the newest lineage, or of an older one whose trainer hasn't heard: whole, or as changes of any."""
        lineage = weights._versioned.next_lineage()
        if data.draw(st.integers(0, 5)) == 0:
            lineage = data.draw(st.integers(0, lineage))
        last = weights.newest(lineage) if any(v.lineage == lineage for v in weights.versions()) else weights._versioned._lineages.parent(lineage)
        version = Version(lineage, (0 if last is None else last.step + 1))
        older = [found for found in weights.versions() if found < version]
        base = data.draw(st.sampled_from(older)) if older and data.draw(st.booleans()) else None
        files = {"config.json": data.draw(st.sampled_from([b"one", b"two"]))} if data.draw(st.booleans()) else {}
        try:
            put(weights, version, base, files)
        except (VersionTaken, VersionPassed, VersionMissing):
            return

    @rule(data=st.data())
    def publishes(self, data: st.DataObject) -> None:
        self.publish(self.weights, data)

    @rule(data=st.data(), left=st.integers(0, 6))
    def publishes_and_dies(self, data: st.DataObject, left: int) -> None:
        self.dying(left, lambda: self.publish(self.weights, data))

    @rule(data=st.data(), at=st.integers(0, 8))
    def publishes_while_another_collects(self, data: st.DataObject, at: int) -> None:
        changes = iter(range(1000))

        def before(kind: str, path: str) -> None:
            if next(changes) == at:
                self.script.before = None
                self.others.gc(Retention(), grace_s=GRACE, now=self.now)

        self.script.before = before
        try:
            self.publish(self.weights, data)
        finally:
            self.script.before = None

    @rule(data=st.data())
    def opens_a_lineage(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        if parent is not None or data.draw(st.booleans()):
            self.weights.open_lineage(parent)

    @rule(data=st.data(), name=st.sampled_from(["best", "last"]))
    def tags_a_version(self, data: st.DataObject, name: str) -> None:
        self.tag(self.weights, name, self.pick(data))

    def tag(self, weights: WeightStore, name: str, version: Version | None) -> None:
        if version is not None:
            try:
                weights.tag(name, version)
            except VersionMissing:  # the tag is where it was, or gone if the version went at this very moment
                found = weights.tags().get(name)
                assert found in {None, self.tags.get(name)}
                if found is None:
                    self.tags.pop(name, None)
            else:
                self.tags[name] = version

    @precondition(lambda self: self.tags)
    @rule(data=st.data())
    def takes_a_tag_away(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tags)))
        self.weights.untag(name)
        del self.tags[name]

    @rule(data=st.data(), seconds=st.sampled_from([10.0, 150.0, 1000.0]))
    def leases_a_version(self, data: st.DataObject, seconds: float) -> None:
        self.lease(self.weights, self.pick(data), seconds)

    def lease(self, weights: WeightStore, version: Version | None, seconds: float) -> None:
        if version is not None:
            try:
                lease = weights.lease(version, seconds)
            except VersionMissing:
                return
            self.leases.append((lease, self.now + seconds))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def releases_a_lease(self, data: st.DataObject) -> None:
        lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        lease.release()

    @rule(seconds=st.sampled_from([1.0, 60.0, GRACE, 500.0, layout.LONGEST_PUBLISH_S]))
    def time_passes(self, seconds: float) -> None:
        self.script.now = self.others.objects.script.now = self.now + seconds

    def collect(self, data: st.DataObject) -> None:
        retention = Retention(
            keep_last=data.draw(st.integers(1, 3)),
            keep_every=data.draw(st.sampled_from([None, 2, 5])),
            window=data.draw(st.sampled_from([None, 0, 2])),
        )
        self.weights.gc(retention, grace_s=GRACE, now=self.now)

    @rule(data=st.data())
    def collects(self, data: st.DataObject) -> None:
        self.collect(data)
        self.given = False

    @rule(data=st.data(), left=st.integers(0, 12))
    def collects_and_dies(self, data: st.DataObject, left: int) -> None:
        self.dying(left, lambda: self.collect(data))

    @rule(data=st.data(), at=st.integers(0, 8), left=st.none() | st.integers(0, 12))
    def collects_while_another_acts(self, data: st.DataObject, at: int, left: int | None) -> None:
        """The other one acts right before change number `at` of the collection, which may be killed later."""
        version = self.pick(data)
        acts = {
            "tag": lambda: self.tag(self.others, "best", version),
            "lease": lambda: self.lease(self.others, version, 150.0),
            "publish": lambda: self.publish(self.others, data),
            "lineage": lambda: self.lineage(version),
            "collect": lambda: self.others.gc(Retention(), grace_s=GRACE, now=self.now),
        }
        act = acts[data.draw(st.sampled_from(sorted(acts)))]
        changes = iter(range(1000))

        def before(kind: str, path: str) -> None:
            if next(changes) == at:
                self.script.before = None
                act()

        self.script.before = before
        try:
            if left is None:
                self.collects(data)
            else:
                self.dying(left, lambda: self.collect(data))
        finally:
            self.script.before = None

    def lineage(self, version: Version | None) -> None:
        if version is not None:
            try:
                self.others.open_lineage(version)
            except VersionMissing:
                return

    def dying(self, left: int, act: Any) -> None:
        self.script.left = left
        try:
            act()
        except Killed:
            self.given = True
        finally:
            self.script.left = None

    @invariant()
    def every_version_that_exists_is_whole_and_every_claimed_one_exists(self) -> None:
        if not hasattr(self, "weights"):
            return
        existing = self.weights.versions()
        assert all(whole(self.weights, version) for version in existing)
        if self.given:  # the next collection puts back what a killed one had no time to
            self.others.gc(Retention(keep_last=1000, keep=frozenset(existing)), grace_s=GRACE, now=self.now)
            self.given = False
            existing = self.weights.versions()
        newest = self.weights.newest()
        assert newest is None or newest in existing
        assert set(self.tags.values()) <= set(existing)
        assert {lease.version for lease, until in self.leases if until > self.now} <= set(existing)
        assert all(self.weights.commit(version).base in {None, *existing} for version in existing)
        assert self.weights.tags() == self.tags
        needed = {entry.key for version in existing for entry in self.weights.commit(version).files.values()}
        assert needed <= set(self.weights.objects.list("files"))

    def teardown(self) -> None:
        if not hasattr(self, "weights"):
            return
        try:
            self.all_else_goes()
        finally:  # one memory for all runs, and every listing goes through all of it
            objects = fsspec.filesystem("memory").store
            for path in [path for path in objects if path.startswith(self.root)]:
                del objects[path]

    def all_else_goes(self) -> None:
        for name in self.tags:
            self.weights.untag(name)
        newest = self.weights.newest()
        for _ in range(4):
            self.script.now = self.now + layout.LONGEST_PUBLISH_S + SWEPT_AFTER_S + 1000
            found = self.weights.gc(Retention(), grace_s=GRACE, now=self.now)
        existing = self.weights.versions()
        assert list(found.kept) == existing and (newest is None or newest in existing)
        assert self.weights.newest() == newest
        report = self.weights.verify()
        assert report.sound and report.orphans == () and report.retired == () and report.versions == tuple(existing)
        commits = [self.weights.commit(version) for version in existing]
        prefixes = {layout.attempt_prefix(path) for path in self.weights.objects.list("data")}
        assert prefixes == {layout.data_prefix(commit.version, commit.attempt) for commit in commits}
        files = {entry.key for commit in commits for entry in commit.files.values()}
        assert set(self.weights.objects.list("files")) == files
        folders = {path.split("/")[0] for path in self.weights.objects.list()}
        assert folders <= {"commits", "data", "files", "lineages"}


class TestKeeping(Keeping.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None, phases=[Phase.generate])
