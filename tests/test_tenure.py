"""One coordinator a run: a second one is refused while the first is there, and fences it off once it is not."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from rollart import lease
from rollart.journal import Journal, Opened
from rollart.lease import Lease, RunHeld
from rollart.processes import Process, is_gone, this_process
from rollart.tenure import PROOF_S, LedgerTaken, Tenure, coordinating
from storage.errors import StoreError, StoreUnreachable
from storage.objects.store import ObjectStore


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore(str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def held_by(store: ObjectStore, by: Process, *, silent_s: float, seconds: float = 15.0) -> Tenure:
    """A coordinator that said so lastly `silent_s` seconds ago."""
    now = time.time()
    Journal(store).append(0, Opened(by, now - 100.0))
    held = Lease(0, by, now - 100.0, now - silent_s, seconds)
    assert lease.write(store, held)
    return Tenure(store, held)


ELSEWHERE = dataclasses.replace(this_process(), host="elsewhere")


def ended_process() -> Process:
    """One of this host that was and is no more."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        me = dataclasses.replace(this_process(), pid=child.pid, started=psutil.Process(child.pid).create_time())
        assert not is_gone(me)
        child.communicate(b"\n")
    return me


def test_a_process_is_gone_when_its_host_says_so_and_another_one_of_its_number_is_not_it() -> None:
    assert is_gone(ended_process())
    assert is_gone(dataclasses.replace(this_process(), started=this_process().started - 60.0))
    assert not is_gone(this_process()) and not is_gone(dataclasses.replace(ELSEWHERE, pid=2**22 + 1))


def test_a_second_start_is_refused_while_the_first_is_heard_of(store: ObjectStore) -> None:
    held_by(store, ELSEWHERE, silent_s=4.0)
    said = rf"^{re.escape(store.url)} is run by process {ELSEWHERE.pid} on elsewhere since .* \(coordinator 0, last heard of 4 s ago\): stop it"
    with pytest.raises(RunHeld, match=said):
        Tenure.take(store, 15.0)
    assert Journal(store).last() == 0


@pytest.mark.parametrize("by, silent_s", [("gone", 0.0), ("elsewhere", 16.0), ("here", 16.0)])
def test_a_run_is_taken_over_from_a_process_that_is_gone_or_silent_for_longer_than_its_lease(store: ObjectStore, by: str, silent_s: float) -> None:
    first = held_by(store, {"gone": ended_process, "elsewhere": lambda: ELSEWHERE, "here": this_process}[by](), silent_s=silent_s)
    second = Tenure.take(store, 15.0)
    assert (second.number, Journal(store).last()) == (1, 1)
    second.commit(1, 4, (("train/lake/0/0/0", "a", "trained"),))
    with pytest.raises(LedgerTaken, match=rf"taken over by process {this_process().pid} on .*, its coordinator 1 since .* was its coordinator 0"):
        first.commit(0, 9, ())
    with pytest.raises(LedgerTaken):
        first.check()
    second.check()
    second.commit(1, 5, ())
    assert [(b.coordinator, b.lineage, b.step) for b in Journal(store).batches()] == [(1, 1, 4), (1, 1, 5)]


def test_one_that_comes_back_neither_takes_the_lease_again_nor_releases_it(store: ObjectStore) -> None:
    first = held_by(store, ELSEWHERE, silent_s=16.0)
    second = Tenure.take(store, 15.0)
    assert second.holds() and not first.holds()
    assert not first.renew() and not first.holds()
    first.release()
    held = lease.read(store)
    assert held is not None and (held.number, held.by) == (1, this_process())
    second.release()
    assert lease.read(store) is None
    assert Tenure.take(store, 15.0).number == 2


def test_of_two_that_take_a_run_over_at_once_one_commits(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by(store, ELSEWHERE, silent_s=16.0)
    monkeypatch.setattr(lease, "refuse_if_held", lambda store: None)  # each looked before the other wrote
    first, second = Tenure.take(store, 15.0), Tenure.take(store, 15.0)
    assert (first.number, second.number) == (1, 2)
    with pytest.raises(LedgerTaken):
        first.commit(1, 0, ())
    second.commit(2, 0, ())


def test_a_coordinator_knows_that_it_holds_the_run_for_as_long_as_its_lease_or_right_after_it_has_looked(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("rollart.tenure.time.monotonic", lambda: now[0])
    tenure = Tenure.take(store, 15.0)
    for seconds, holds in ((14.9, True), (0.2, False), (10.0, False)):
        now[0] += seconds
        assert tenure.holds() is holds
    for look in (tenure.check, lambda: tenure.commit(0, 0, ())):
        look()
        assert tenure.holds()
        now[0] += PROOF_S
        assert not tenure.holds()
    assert tenure.renew() and tenure.holds()


def test_a_record_that_cannot_be_read_holds_nobody_off(store: ObjectStore) -> None:
    store.write(lease.RECORD, b"{")
    assert Tenure.take(store, 15.0).number == 0


async def test_the_lease_is_renewed_while_it_is_held_and_ends_with_it(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: asyncio.Queue[float] = asyncio.Queue()
    write, loop = lease.write, asyncio.get_running_loop()

    def told(store: ObjectStore, held: Lease) -> bool:
        written = write(store, held)
        loop.call_soon_threadsafe(renewed.put_nowait, held.renewed)
        return written

    monkeypatch.setattr(lease, "write", told)
    async with coordinating(store, 0.3) as tenure:
        times = [await asyncio.wait_for(renewed.get(), 20) for _ in range(3)]
        assert times == sorted(set(times))
        held = lease.read(store)
        assert held is not None and held.number == tenure.number and held.renewed >= times[-1]
    assert lease.read(store) is None


async def test_a_lease_that_cannot_be_renewed_for_a_while_ends_nothing(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: asyncio.Queue[str] = asyncio.Queue()
    write, loop, failures = lease.write, asyncio.get_running_loop(), iter([StoreUnreachable("no way there")] * 2)
    tenure = Tenure.take(store, 0.3)

    def failing(store: ObjectStore, held: Lease) -> bool:
        error: StoreError | None = next(failures, None)
        loop.call_soon_threadsafe(outcomes.put_nowait, "failed" if error else "renewed")
        if error is not None:
            raise error
        return write(store, held)

    monkeypatch.setattr(lease, "write", failing)
    over = threading.Event()
    keeping = threading.Thread(target=tenure.keep, args=(over,))
    keeping.start()
    assert [await asyncio.wait_for(outcomes.get(), 20) for _ in range(3)] == ["failed", "failed", "renewed"]
    over.set()
    keeping.join()
