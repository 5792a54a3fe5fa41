"""The watchdog on a real scheduler whose workers hang, stop answering, lose tasks or go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from distributed import Client, Future, Scheduler, Worker, WorkerPlugin

from rollart.control.silence import Whereabouts
from rollart.rollout import watchdog, whereabouts
from rollart.rollout.watchdog import LostAttempt, NoWorker, Watchdog
from rollart.rollout.whereabouts import look
from rollart.types import Attempt, Episode

PATIENCE_S = 20.0


class Says(WorkerPlugin):
    """Knows what every attempt of an even episode is at."""

    name = "says"

    def doing(self, attempt: Attempt) -> tuple[str, float] | None:
        return ("in reset", 7.0) if attempt.episode.index % 2 == 0 else None


async def hang(attempt: Attempt) -> None:
    await asyncio.Event().wait()


class Sent:
    """Attempts on the cluster, each a task that never ends, and what the watchdog has done about them."""

    def __init__(self, client: Client, resource: str) -> None:
        self.namespace, self.last_end = "run-0-abc", time.monotonic()
        self.failed: list[tuple[Attempt, str]] = []
        self.news = asyncio.Event()
        self._client, self._resource = client, resource
        self._futures: dict[Attempt, Future] = {}
        self.waiting: dict[str, int] = {}

    def send(self, count: int) -> list[Attempt]:
        attempts = [Attempt(Episode("lake", i), 0) for i in range(count)]
        keys = [f"trajectory-lake-{a}-{self.namespace}" for a in attempts]
        futures = self._client.map(hang, attempts, key=keys, resources={self._resource: 1}, pure=False)
        self._futures |= dict(zip(attempts, futures, strict=True))
        return attempts

    @property
    def in_flight(self) -> int:
        return len(self._futures) + sum(self.waiting.values())

    def keys(self) -> dict[Attempt, list[str]]:
        return {a: [f.key] for a, f in self._futures.items()}

    def held(self) -> dict[str, int]:
        return self.waiting

    async def fail(self, attempts: Sequence[Attempt], error: BaseException) -> None:
        self.failed += [(a, type(error).__name__) for a in attempts]
        self.news.set()


class Cluster:
    """A scheduler, a worker with four slots of PLAY, and who watches."""

    def __init__(self, stack: AsyncExitStack, scheduler: Scheduler, client: Client) -> None:
        self.stack, self.scheduler, self.client = stack, scheduler, client
        self.sent = Sent(client, "PLAY")
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.news = asyncio.Event()

    async def worker(self, name: str) -> Worker:
        worker = Worker(self.scheduler.address, nthreads=8, resources={"PLAY": 4}, name=name, dashboard=False)
        await self.stack.enter_async_context(worker)
        await worker.plugin_add(Says(), name=Says.name)
        return worker

    def tell(self, text: str, figures: Mapping[str, Any]) -> None:
        self.told.append((text, figures))
        self.news.set()

    def watch(self, silence_s: float = 1000.0, worker_wait_s: float = 1000.0) -> asyncio.Task[None]:
        task = asyncio.create_task(Watchdog(self.client, lambda: [self.sent], silence_s, worker_wait_s, self.tell).keep())
        self.stack.push_async_callback(asyncio.wait, (task,))
        self.stack.callback(task.cancel)
        return task

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.news.clear()
                await self.news.wait()

    async def where(self, wanted: Callable[[list[Whereabouts]], bool]) -> list[Whereabouts]:
        """What a look finds, as soon as it is as wanted: Dask takes a moment to bring a task to its worker."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await look(self.client, self.sent.keys())
                if wanted(found):
                    return found
                await asyncio.sleep(0.01)


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(watchdog, "TICK_S", 0.02)
    monkeypatch.setattr(watchdog, "CONFIRM_S", 0.02)
    monkeypatch.setattr(watchdog, "GRACE_S", 0.1)
    async with (
        Scheduler(protocol="inproc", dashboard=False) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
        AsyncExitStack() as stack,
    ):
        yield Cluster(stack, scheduler, client)


async def test_silence_is_told_with_what_each_worker_is_at(cluster: Cluster) -> None:
    await cluster.worker("player-0")
    cluster.sent.send(6)
    await cluster.where(lambda found: sum(w.kind == "working" for w in found) == 4)
    cluster.sent.last_end -= 3.0
    cluster.watch(silence_s=2.0)
    await cluster.until(lambda: bool(cluster.told))
    ((text, figures),) = cluster.told
    assert figures["text"] == text
    head, line = text.splitlines()
    assert head == "nothing has ended for 3 s; in flight:"
    assert line.startswith("  6 trajectories of lake on worker player-0: 2 at work, 2 waiting for a slot, 2 in reset for 7 s"), line
    assert figures["kind"] == "silence" and figures["in_flight"] == 6 and figures["lost"] == 0


async def test_an_attempt_whose_worker_has_never_heard_of_it_is_failed_and_no_other(cluster: Cluster) -> None:
    worker = await cluster.worker("player-0")
    lost, *_ = cluster.sent.send(3)
    await cluster.where(lambda found: all(w.kind == "working" for w in found))
    worker.state.tasks.pop(cluster.sent.keys()[lost][0])
    cluster.sent.last_end -= 3.0
    cluster.watch(silence_s=2.0)
    await asyncio.wait_for(cluster.sent.news.wait(), PATIENCE_S)
    assert cluster.sent.failed == [(lost, LostAttempt.__name__)]
    assert "1 that no worker has are tried again" in cluster.told[0][0] and cluster.told[0][1]["lost"] == 1


async def test_a_worker_that_does_not_answer_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "ANSWER_S", 0.3)
    await cluster.worker("player-0")
    cluster.sent.send(2)
    await cluster.where(lambda found: all(w.kind == "working" for w in found))

    async def silent(*given: Any, **how: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster.client, "run", silent)
    found = await look(cluster.client, cluster.sent.keys())
    assert [(w.kind, w.where) for w in found] == [("unanswered", "player-0")] * 2


async def test_a_resource_whose_last_worker_went_away_is_told_and_so_is_its_return(cluster: Cluster) -> None:
    worker = await cluster.worker("player-0")
    attempts = cluster.sent.send(3)
    await cluster.where(lambda found: all(w.kind == "working" for w in found))
    cluster.watch()
    await worker.close()
    await cluster.until(lambda: len(cluster.told) == 1)
    assert cluster.told[0][0].startswith("no worker has the resource PLAY any more: 3 tasks wait for one, and the run fails")
    assert cluster.told[0][1] == {"kind": "workers", "missing": {"PLAY": 3}, "text": cluster.told[0][0]}
    assert await cluster.where(lambda found: True) == [Whereabouts(a, "no_worker", "PLAY") for a in attempts]
    await cluster.worker("player-1")
    await cluster.until(lambda: len(cluster.told) == 2)
    assert cluster.told[1][0].startswith("nothing waits in vain for the resource PLAY any more")
    assert cluster.told[1][1] == {"kind": "workers", "missing": {}, "text": cluster.told[1][0]}
    await cluster.where(lambda found: [(w.kind, w.where) for w in found] == [("working", "player-1")] * 3)


async def test_a_resource_that_does_not_come_back_is_the_error(cluster: Cluster) -> None:
    worker = await cluster.worker("player-0")
    cluster.sent.send(3)
    await cluster.where(lambda found: all(w.kind == "working" for w in found))
    watching = cluster.watch(worker_wait_s=0.4)
    await worker.close()
    with pytest.raises(NoWorker, match=r"no worker has had the resource PLAY for 0 s \(rollout.worker_wait\), and 3 tasks wait for one; start one"):
        await asyncio.wait_for(watching, PATIENCE_S)


async def test_work_that_is_held_back_for_a_resource_that_no_worker_has_counts_too(cluster: Cluster) -> None:
    cluster.sent.waiting = {"PLAY": 5}
    with pytest.raises(NoWorker, match="and 5 tasks wait for one"):
        await asyncio.wait_for(cluster.watch(worker_wait_s=0.2), PATIENCE_S)


async def test_a_busy_run_is_left_alone(cluster: Cluster) -> None:
    await cluster.worker("player-0")
    cluster.sent.send(3)
    await cluster.where(lambda found: all(w.kind == "working" for w in found))
    watching = cluster.watch(silence_s=1000.0)
    await asyncio.wait((watching,), timeout=0.3)
    assert cluster.told == [] and cluster.sent.failed == [] and not watching.done()
