"""What an earlier execution of a task recorded is found by its key, at little cost, and nothing else is taken for it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

import pytest

from rollart.rollout import recorded
from rollart.rollout.flush_pace import FlushPace
from rollart.rollout.recorded import Recorded, own_nonce
from rollart.rollout.records import FLUSHED, RecordsDamaged, encode, flushed_at, flushed_name
from rollart.rollout.writer import TrajectoryWriter
from rollart.types import Attempt, Episode, Receipt, Segment, Trajectory
from storage.objects.store import ObjectStore

ATTEMPT = Attempt(Episode("lake", 3, "evaluate"), 0, 1)


class Counting(ObjectStore):
    """Counts listings and the bytes that are read."""

    listings = 0
    fetched = 0

    def infos(self, prefix: str = "") -> list:
        self.listings += 1
        return super().infos(prefix)

    def read_into(self, path, buffer, start=0, seen=None) -> int:
        self.fetched += len(buffer)
        return super().read_into(path, buffer, start, seen)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(str(tmp_path))


def played(nonce: str, attempt: Attempt = ATTEMPT, tokens: int = 4) -> Trajectory:
    segment = Segment()
    segment.append_prompt(range(tokens))
    segment.append_response([8, 9], [-0.25, -1.5], [2, 3], "stop")
    return Trajectory(attempt, nonce, 1, 99, [segment], "terminated", {"a": 1}, {"start": 5.0, "total": 2.5})


def flush(store: ObjectStore, *trajectories: Trajectory, at: float, writer: str = "w") -> str:
    store.write(name := flushed_name(writer, 0, at), encode(trajectories))
    return name


async def test_the_execution_of_a_task_that_was_recorded_first_is_found_by_the_tasks_key(store: Counting) -> None:
    now = time.time()
    first, second = played(own_nonce("key")), played(own_nonce("key"))
    other = played(own_nonce("another dispatch"))  # the same episode, evaluated a moment before
    flush(store, other, at=now - 1.0)
    file = flush(store, played(own_nonce("key"), dataclasses.replace(ATTEMPT, member=1)), first, at=now, writer="x")
    flush(store, second, at=now + 1.0)
    found = Recorded(store)
    assert await found.find(ATTEMPT, "key", now) == Receipt(
        ATTEMPT, first.nonce, 1, file, 1, "terminated", 2, 3, 6, 2, 1, {"start": 5.0, "total": 2.5}
    )  # fmt: skip
    assert await found.find(ATTEMPT, "third", now) is None
    assert first.nonce != second.nonce and len(first.nonce) == 32


async def test_what_the_writer_returned_for_a_trajectory_is_what_is_found(store: Counting) -> None:
    trajectory = played(own_nonce("key"))
    before = time.time()
    file, row = await TrajectoryWriter(store, FlushPace(0.01, 8)).write(trajectory)
    assert before - 0.001 <= flushed_at(file) <= time.time()
    receipt = await Recorded(store).find(ATTEMPT, "key", before)
    assert receipt is not None and (receipt.file, receipt.row, receipt.nonce) == (file, row, trajectory.nonce)


async def test_what_this_process_recorded_is_found_without_being_read(store: Counting) -> None:
    now = time.time()
    mine = [played(own_nonce(f"{i}")) for i in range(3)]
    file = flush(store, *mine, at=now)
    found = Recorded(store)
    receipts = [Receipt(ATTEMPT, t.nonce, 1, file, row, "terminated", 2, 3, 6, 2, 1) for row, t in enumerate(mine)]
    for receipt in receipts:
        found.note(receipt)
    assert await found.find(ATTEMPT, "1", now) == receipts[1] and await found.find(ATTEMPT, "9", now) is None
    assert store.fetched == 0
    other = flush(store, played(own_nonce("9")), at=now + 1.0, writer="x")
    receipt = await found.find(ATTEMPT, "9", now)
    assert receipt is not None and receipt.file == other and store.fetched > 0


async def test_only_what_is_young_enough_is_read_and_each_file_once_and_without_its_tokens(store: Counting) -> None:
    now = time.time()
    flush(store, played(own_nonce("key")), at=now - recorded.SKEW_S - 1.0)
    file = flush(store, *(played(own_nonce(f"{i}"), tokens=400_000 + i) for i in range(3)), at=now)
    whole = len(store.read(file))
    found = Recorded(store)
    assert await found.find(ATTEMPT, "key", now) is None  # an older one is of another dispatch
    assert 0 < store.fetched < whole / 10
    fetched = store.fetched
    assert await found.find(ATTEMPT, "2", now) is not None
    assert store.fetched == fetched


async def test_those_that_look_together_share_a_listing_and_those_that_come_later_do_not(store: Counting) -> None:
    now = time.time()
    found = Recorded(store)
    assert await asyncio.gather(*(found.find(ATTEMPT, f"{i}", now) for i in range(20))) == [None] * 20
    assert store.listings == 1
    flush(store, played(own_nonce("3")), at=now)
    assert await found.find(ATTEMPT, "3", now) is not None
    assert store.listings == 2


async def test_files_that_are_not_remembered_are_read_again(store: Counting) -> None:
    now = time.time()
    for i in range(3):
        flush(store, played(own_nonce(f"{i}")), at=now + 100.0 * i)
    found = Recorded(store, keep=1)
    for i in (0, 1, 2, 0):
        assert await found.find(ATTEMPT, f"{i}", now + 100.0 * i) is not None


async def test_however_many_files_are_young_enough_the_next_that_looks_reads_none_of_them_again(store: Counting) -> None:
    now = time.time()
    for i in range(5):
        flush(store, played(own_nonce(f"{i}")), at=now + i)
    found = Recorded(store, keep=2)
    assert await found.find(ATTEMPT, "none", now) is None
    fetched = store.fetched
    assert await found.find(ATTEMPT, "another", now) is None and store.fetched == fetched


async def test_a_file_that_is_none_of_a_runs_is_named(store: Counting) -> None:
    store.write(f"{FLUSHED}/notes.txt", b"")
    with pytest.raises(RecordsDamaged, match=r"flushed/notes.txt is not named as a run names its files"):
        await Recorded(store).find(ATTEMPT, "key", time.time())
    store.delete(f"{FLUSHED}/notes.txt")
    store.write(flushed_name("w", 0, time.time()), b"PAR1 no more")
    with pytest.raises(RecordsDamaged, match="is no whole Parquet file"):
        await Recorded(store).find(ATTEMPT, "key", time.time())
