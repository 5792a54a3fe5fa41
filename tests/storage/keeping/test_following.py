"""Following the newest versions: order, window, lineages, the end, and a store that can't be reached."""

from __future__ import annotations

import asyncio
import logging
import threading
from itertools import islice

import pytest

from storage.errors import StoreUnreachable
from storage.keeping import following
from storage.keeping.following import LOOKS, next_version
from storage.keeping.retention import Retention
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.scripted import Script, ScriptedStore, put

POLL = 0.001


def v(step: int, lineage: int = 0) -> Version:
    return Version(lineage, step)


@pytest.fixture
def weights(place):
    return WeightStore(*place)


def test_versions_come_in_order_as_they_appear_and_only_those_after(weights):
    for step in (0, 1, 2):
        put(weights, v(step))
    followed = weights.follow(after=v(0), poll_s=POLL)
    assert list(islice(followed, 2)) == [v(1), v(2)]
    put(weights, v(5))
    assert next(followed) == v(5)
    assert list(weights.follow(poll_s=POLL, timeout=0)) == [v(0), v(1), v(2), v(5)]


def test_one_that_appears_while_the_follower_waits_is_given(weights):
    thread = threading.Timer(0.05, put, (weights, v(0)))
    thread.start()
    assert next(weights.follow(poll_s=POLL, timeout=60)) == v(0)
    thread.join()


def test_what_is_older_than_the_window_by_then_is_skipped(weights):
    for step in range(6):
        put(weights, v(step))
    assert list(weights.follow(window=2, poll_s=POLL, timeout=0)) == [v(3), v(4), v(5)]
    newest_only = weights.follow(window=0, poll_s=POLL)
    assert next(newest_only) == v(5)
    put(weights, v(6))
    put(weights, v(9))
    assert next(newest_only) == v(9)
    slow = weights.follow(window=1, after=v(4), poll_s=POLL)
    put(weights, v(10))
    assert next(slow) == v(9)


def test_a_new_lineage_is_gone_on_with_and_an_abandoned_tail_never_given(weights):
    for step in range(4):
        put(weights, v(step))
    ahead, behind = weights.follow(after=v(3), poll_s=POLL, timeout=0), weights.follow(after=v(0), poll_s=POLL)
    assert next(behind) == v(1)
    weights.open_lineage(v(1))
    put(weights, v(4))  # its trainer hasn't heard yet
    assert list(ahead) == []
    put(weights, v(2, 1))
    put(weights, v(3, 1))
    assert list(islice(behind, 2)) == [v(2, 1), v(3, 1)]
    assert list(weights.follow(after=v(3), poll_s=POLL, timeout=0)) == [v(2, 1), v(3, 1)]
    assert list(weights.follow(poll_s=POLL, timeout=0)) == [v(0), v(1), v(2, 1), v(3, 1)]


def test_a_follower_is_not_stopped_by_collections(weights):
    for step in range(3):
        put(weights, v(step))
    followed = weights.follow(poll_s=POLL)
    assert next(followed) == v(0)
    weights.gc(Retention(), grace_s=0)
    assert next(followed) == v(2)


def test_it_ends_when_it_is_told_to_or_when_nothing_comes_for_the_timeout(weights):
    put(weights, v(0))
    stop = threading.Event()
    followed = weights.follow(poll_s=1000, stop=stop)
    assert next(followed) == v(0)
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    assert list(followed) == []
    timer.join()
    assert list(weights.follow(after=v(0), poll_s=1000, timeout=0.01)) == []


class Unreachable(ScriptedStore):
    """Can't be listed for `failures` looks."""

    failures = 0
    looks = 0

    def infos(self, prefix=""):
        self.looks += 1
        if self.failures:
            self.failures -= 1
            raise StoreUnreachable(f"listing {self.url} failed: no route")
        return super().infos(prefix)


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_store_that_cannot_be_reached_is_asked_again_ever_later_and_given_up_in_the_end(place, caplog, monkeypatch):
    pauses = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None: pauses.append(seconds))
    put(WeightStore(*place), v(0))
    store = Unreachable.over(place, Script())
    weights = WeightStore.over(store)
    store.failures = LOOKS - 1
    with caplog.at_level(logging.WARNING):
        followed = weights.follow(poll_s=2.0)
        assert next(followed) == v(0)
    assert pauses == [4.0, 8.0, 16.0, 30.0, 30.0]
    assert [f"look {n} of {LOOKS} failed" in record.message for n, record in enumerate(caplog.records, 1)] == [True] * (LOOKS - 1)
    store.failures, store.looks = LOOKS, 0
    with pytest.raises(StoreUnreachable, match="no route"):
        next(followed)
    assert store.looks == LOOKS


async def test_it_can_be_followed_inside_of_a_running_loop_which_stays_free(weights):
    put(weights, v(0))
    found, ticks = [], 0

    async def consume() -> None:
        async for version in weights.follow_async(poll_s=POLL):
            found.append(version)
            if version == v(2):
                return

    task = asyncio.create_task(consume())
    while len(found) < 1:
        ticks += 1
        await asyncio.sleep(0)
    put(weights, v(2))
    await asyncio.wait_for(task, 60)
    assert found == [v(0), v(2)] and ticks > 1
    assert [version async for version in weights.follow_async(after=v(2), poll_s=POLL, timeout=0)] == []


def test_the_next_version_is_decided_without_a_store():
    versions = [v(0), v(1), v(2), v(3), v(2, 1)]
    assert next_version(versions, {1: v(1)}, v(1), None) == v(2, 1)
    assert next_version(versions, {1: v(1)}, v(3), None) == v(2, 1)
    assert next_version(versions, {1: v(1)}, v(2, 1), None) is None
    assert next_version(versions, {1: v(1)}, None, 1) == v(1)
    assert next_version([v(0), v(7)], {1: v(5)}, None, None) == v(0)  # a branch point that is gone doesn't stop it
    assert next_version([], {}, None, 0) is None


@pytest.mark.parametrize("wrong", [{"window": -1}, {"poll_s": 0.0}])
def test_arguments_that_cannot_be_are_refused_by_name(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WeightStore(str(tmp_path)).follow(**wrong)


def test_a_pause_never_goes_beyond_the_end(tmp_path, monkeypatch):
    follower = following.Follower(WeightStore(str(tmp_path)).objects, None, None, 1000.0, 5.0)
    assert 0 <= follower.pause <= 5.0
