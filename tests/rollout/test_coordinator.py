"""The coordinator between a real ledger and a cluster that does as it is told: what it starts, stops, tries again and raises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import TaskQuota
from rollart.control.redundancy import MEASURED, Redundancy
from rollart.control.staleness import StalenessWindow
from rollart.rollout import coordinator
from rollart.rollout.coordinator import Rollout, RolloutFailed, Stalled, begun_topic
from rollart.rollout.dispatcher import Ended
from rollart.types import Attempt, Member, Outcome, Receipt, Score

PATIENCE_S = 20.0


class Cluster:
    """Stands in for the dispatcher: keeps what is dispatched in `open` until a test ends it."""

    def __init__(self) -> None:
        self.open: list[Attempt] = []
        self.working: Callable[[Attempt], bool] = lambda attempt: False
        self.looks = 0
        self.dispatched: list[Attempt] = []
        self.held: list[Attempt] = []
        self._ends: asyncio.Queue[list[Ended]] = asyncio.Queue()
        self._news = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self.open)

    def waiting(self) -> list[Attempt]:
        return self.held

    def hear(self, goes_out: Callable[[list[Attempt]], None]) -> None:
        self.goes_out = goes_out

    def dispatch(self, attempts: Sequence[Attempt]) -> None:
        self.open += attempts
        self.dispatched += attempts
        self._news.set()

    async def cancel(self, attempts: Sequence[Attempt]) -> None:
        self.open = [a for a in self.open if a not in attempts]
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns once `holds`, looking whenever something was dispatched or cancelled."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def at_work(self, attempts: Sequence[Attempt], within_s: float) -> list[Attempt]:
        self.looks += 1
        self._news.set()
        return [a for a in attempts if self.working(a)]

    async def whereabouts(self) -> str:
        return f"{len(self.open)} trajectories of lake on worker player-0"

    def follow(self, topic: str, begun: Callable[[list[Attempt]], None]) -> None:
        self.topic, self.begun = topic, begun

    async def close(self) -> None:
        self.open = []

    async def ended(self) -> AsyncIterator[list[Ended]]:
        while True:
            yield await self._ends.get()

    def score(self, attempts: Sequence[Attempt], version: int = 0, outcome: Outcome = "terminated") -> None:
        self._end([Ended(a, _member(a, version, outcome), None) for a in attempts])

    def fail(self, attempts: Sequence[Attempt], error: str = "the engine is gone") -> None:
        self._end([Ended(a, None, RuntimeError(error), "environment") for a in attempts])

    def _end(self, ends: list[Ended]) -> None:
        self.open = [a for a in self.open if a not in {e.attempt for e in ends}]
        self._ends.put_nowait(ends)


def _member(attempt: Attempt, version: int, outcome: Outcome) -> Member:
    receipt = Receipt(attempt, str(attempt), 0, "f", 0, outcome, version, version, 4, 2, 1)
    return Member(receipt, Score(attempt, receipt.nonce, float(attempt.member)))


def rollout(cluster: Cluster, alpha: int = 0, lease_s: float = 1000.0, stall_s: float = 1000.0) -> Rollout:
    """One task, two groups of two a batch, two tries at a member."""
    ledger = Ledger([TaskQuota("lake", 2, 2, 2)], StalenessWindow(alpha), FailurePolicy(2, lease_s))
    return Rollout(ledger, cluster, stall_s=stall_s, served=0)  # type: ignore[arg-type]


async def soon(work: object) -> object:
    return await asyncio.wait_for(work, PATIENCE_S)  # type: ignore[arg-type]


async def test_a_batch_comes_of_what_was_scored_and_a_new_version_starts_more() -> None:
    cluster = Cluster()
    async with rollout(cluster) as running:
        assert len(cluster.open) == 4 and running.awaited() == "2 groups of lake"
        cluster.score(cluster.open)
        batch = await soon(running.next_batch())
        assert [g.episode.index for g in batch.groups] == [0, 1] and cluster.open == []  # type: ignore[attr-defined]
        running.advance(1)
        assert [a.episode.index for a in cluster.open] == [2, 2, 3, 3]
    assert cluster.open == []


async def test_a_version_that_comes_after_the_end_starts_nothing() -> None:
    cluster = Cluster()
    async with rollout(cluster) as running:
        cluster.score(cluster.open)
        await soon(running.next_batch())
    running.advance(1)
    assert cluster.open == [] and len(cluster.dispatched) == 4


async def test_what_failed_is_tried_again_and_given_up_with_its_group() -> None:
    cluster = Cluster()
    async with rollout(cluster) as running:
        first = cluster.open[0]
        waiting = asyncio.create_task(running.next_batch())
        cluster.fail([first])
        await cluster.until(lambda: first.retried() in cluster.open)
        cluster.fail([first.retried()])
        await cluster.until(lambda: any(a.episode.index == 2 for a in cluster.open))
        assert [a.episode.index for a in cluster.open] == [1, 1, 2, 2]  # its mate was cancelled, another group came
        cluster.score(cluster.open)
        batch = await soon(waiting)
        assert [g.episode.index for g in batch.groups] == [1, 2]  # type: ignore[attr-defined]


async def test_silent_attempts_are_cancelled_when_their_lease_ends_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "TICK_S", 0.001)
    cluster = Cluster()
    async with rollout(cluster, lease_s=0.05) as running:
        silent = list(cluster.open)
        await cluster.until(lambda: all(a.retried() in cluster.dispatched for a in silent))
        assert set(cluster.open).isdisjoint(silent)
        running.ledger.renew(running.ledger.running(), 1e12)
        cluster.score(cluster.open)
        await soon(running.next_batch())


async def test_the_lease_of_what_waits_for_room_begins_when_it_goes_to_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "TICK_S", 0.001)
    cluster = Cluster()
    async with rollout(cluster, lease_s=0.02) as running:
        cluster.held = held = list(cluster.open)
        until = time.monotonic() + 0.1
        expire, looked = running.ledger.expire, asyncio.Event()

        def look(now: float) -> list[Attempt]:
            if now > until:
                looked.set()
            return expire(now)

        monkeypatch.setattr(running.ledger, "expire", look)
        await soon(looked.wait())
        assert cluster.dispatched == held, "five leases are over, and none has been on the cluster"
        cluster.held = []
        cluster.goes_out(held)
        await cluster.until(lambda: all(a.retried() in cluster.dispatched for a in held))


async def test_what_a_worker_is_at_is_not_silent_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "TICK_S", 0.001)
    cluster = Cluster()
    async with rollout(cluster, lease_s=0.02):
        first = list(cluster.dispatched)
        cluster.working = lambda attempt: attempt != first[0]
        await cluster.until(lambda: cluster.looks >= 5)
        assert cluster.dispatched == [*first, first[0].retried()], "only the one that nobody is at counts as failed"
        assert cluster.open == cluster.dispatched[1:]


async def test_a_silence_in_which_nobody_waited_for_a_batch_is_no_stall() -> None:
    cluster = Cluster()
    async with rollout(cluster) as running:
        running._last_end -= 5000.0  # such as those of an evaluation, or of a long step
        waiting = asyncio.create_task(running.next_batch())
        assert not (await asyncio.wait({waiting}, timeout=1.2))[0], "it has looked once"
        cluster.score(cluster.open)
        await soon(waiting)


async def test_a_late_start_gets_a_spare_and_who_begins_first_goes_on_while_the_other_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "TICK_S", 0.001)
    cluster = Cluster()
    redundancy = Redundancy("before_first_token", factor=1.5)
    ledger = Ledger([TaskQuota("lake", 2, 2, 2)], StalenessWindow(0), FailurePolicy(2), redundancy=redundancy)
    for _ in range(MEASURED):
        ledger.delays.note("lake", 0.02)
    running = Rollout(ledger, cluster, stall_s=1000.0, served=0, begun_topic=begun_topic(redundancy, "run", 3))  # type: ignore[arg-type]
    async with running:
        assert cluster.topic == "begun-run-3"
        late, other, mate, last = cluster.open
        cluster.begun([other, last])
        await cluster.until(lambda: {late.retried(), mate.retried()} <= set(cluster.open))
        cluster.begun([late.retried()])
        await cluster.until(lambda: late not in cluster.open)
        cluster.begun([mate])
        await cluster.until(lambda: mate.retried() not in cluster.open)
        assert sorted(cluster.open) == [late.retried(), other, mate, last]
        cluster.score(cluster.open)
        batch = await soon(running.next_batch())
        assert [m.receipt.attempt for m in batch.members] == [late.retried(), other, mate, last]  # type: ignore[attr-defined]


def test_nobody_tells_what_has_begun_where_no_rule_asks() -> None:
    assert begun_topic(Redundancy(), "run", 0) is None and begun_topic(Redundancy("first_finished"), "run", 0) is None


async def test_failures_without_end_are_raised_with_the_last_ones_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "HOPELESS", 4)
    monkeypatch.setattr(coordinator, "ROUNDS", 1)
    cluster = Cluster()
    async with rollout(cluster) as running:
        cluster.fail(list(cluster.open), "no space left on device")
        with pytest.raises(RolloutFailed, match=r"4 attempts in a row failed; the last, train/lake/1/1/0: no space left on device"):
            await soon(running.next_batch())


async def test_one_round_of_failures_is_bad_luck_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "HOPELESS", 3)
    cluster = Cluster()
    async with rollout(cluster) as running:
        first = list(cluster.open)
        cluster.fail(first, "the shop is closed")
        await cluster.until(lambda: all(a.retried() in cluster.open for a in first))
        cluster.score(cluster.open)
        assert len((await soon(running.next_batch())).members) == 4  # type: ignore[attr-defined]


async def test_a_failed_publication_is_raised_instead_of_a_stall() -> None:
    cluster = Cluster()
    async with rollout(cluster) as running:
        cluster.score(cluster.open)
        await soon(running.next_batch())
        waiting = asyncio.create_task(running.next_batch())  # needs version 1, which never comes
        running.fail(RuntimeError("version 0-1 could not be published"))
        with pytest.raises(RuntimeError, match="could not be published"):
            await soon(waiting)


async def test_silence_is_told_with_what_is_awaited() -> None:
    cluster = Cluster()
    async with rollout(cluster, stall_s=0.0) as running:
        with pytest.raises(Stalled, match=r"awaited: 2 groups of lake; 4 in flight, such as train/lake/0/0/0; look at .*: 4 trajectories of lake on"):
            await soon(running.next_batch())


async def test_filters_that_leave_nothing_are_an_error_that_names_task_and_reasons_and_not_a_loop() -> None:
    cluster = Cluster()
    ledger = Ledger([TaskQuota("lake", 2, 2, 2, long_share=0.0)], StalenessWindow(0), FailurePolicy(2, 1000.0, batches=3))
    async with Rollout(ledger, cluster, stall_s=1000.0, served=0) as running:  # type: ignore[arg-type]
        waiting = asyncio.create_task(running.next_batch())
        for index in range(0, 6, 2):
            await cluster.until(lambda at=index: {a.episode.index for a in cluster.open} == {at, at + 1})
            cluster.score(list(cluster.open), outcome="over_length")
        with pytest.raises(RolloutFailed, match=r"the filters of lake left nothing of its last 6 groups \(too_long 6\).*tasks.NAME.filters"):
            await soon(waiting)
