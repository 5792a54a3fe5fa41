"""Sends attempts to the cluster as futures and reports how each ended; owns futures and keys, decides nothing about them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from distributed import Client, Future

from rollart.control.failures import Cause
from rollart.engines.errors import EngineError
from rollart.rewards.protocol import VerifierFailed
from rollart.rewards.worker import score_task
from rollart.rollout.episode import EpisodeFailed
from rollart.rollout.worker import trajectory_task
from rollart.types import Attempt, Episode, Member


class Stalled(RuntimeError):
    """Nothing has ended for longer than `run.step_timeout`; the message says what is awaited."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt's end: scored (`member`), or failed with `error`, whose fault it was being `cause`."""

    attempt: Attempt
    member: Member | None
    error: BaseException | None
    cause: Cause = "machine"


class Dispatcher:
    """Each trajectory is one future on its environment's class, its score a second one on the reward class.

    `resources`: task -> (environment class's resource, reward class's resource). Keys carry run, lineage and attempt, since equal
    keys on a shared scheduler return another's result.
    """

    def __init__(self, client: Client, resources: Mapping[str, tuple[str, str]], namespace: str) -> None:
        self._client, self._resources, self._namespace = client, resources, namespace
        self._futures: dict[Attempt, tuple[Future, Future]] = {}
        self._waiters: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[Attempt] = asyncio.Queue()
        self._topics: list[str] = []

    @property
    def in_flight(self) -> int:
        """Attempts dispatched whose end has not been reported."""
        return len(self._futures)

    def attempts(self) -> list[Attempt]:
        """The attempts in flight."""
        return list(self._futures)

    def follow(self, topic: str, begun: Callable[[list[Attempt]], None]) -> None:
        """Calls `begun` with attempts in flight that the workers say, on `topic`, have begun to sample."""

        def heard(event: tuple[float, list[tuple[str, int, int, int]]]) -> None:
            told = [Attempt(Episode(task, index), member, number) for task, index, member, number in event[1]]
            begun([attempt for attempt in told if attempt in self._futures])

        self._client.subscribe_topic(topic, heard)
        self._topics.append(topic)

    def dispatch(self, attempts: Sequence[Attempt]) -> None:
        """Starts these attempts of one task; they go out as one graph, so that a group costs the scheduler little more than one task."""
        task = attempts[0].episode.task
        environment, reward = self._resources[task]
        label = re.sub("[^a-zA-Z]", "", task)
        # The attempt first: the dashboard's name of a task goes on over words of letters, and a run's name may begin with one.
        names = [f"{a}-{self._namespace}" for a in attempts]
        keys = [f"trajectory-{label}-{n}" for n in names]
        trajectories = self._client.map(trajectory_task, attempts, keys, key=keys, resources={environment: 1}, pure=False, retries=0)
        scores = self._client.map(score_task, trajectories, key=[f"reward-{label}-{n}" for n in names], resources={reward: 1}, pure=False, retries=0)
        for attempt, trajectory, score in zip(attempts, trajectories, scores, strict=True):
            self._futures[attempt] = (trajectory, score)
            waiter = asyncio.create_task(self._wait(attempt, score))
            self._waiters.add(waiter)
            waiter.add_done_callback(self._waiters.discard)

    async def ended(self, stall_s: float | None = None) -> AsyncIterator[list[Ended]]:
        """Attempts as they end, all that have ended at a time; goes on for ever. Stalled after `stall_s` seconds without any."""
        while True:
            try:
                attempts = [await asyncio.wait_for(self._ended.get(), stall_s)]
            except TimeoutError:
                raise Stalled(
                    f"no trajectory has ended for {stall_s:.0f} s (run.step_timeout); {self.in_flight} in flight, such as "
                    f"{next(iter(self._futures), 'none')}; look at the Dask dashboard's task stream and the workers' logs"
                ) from None
            while not self._ended.empty():
                attempts.append(self._ended.get_nowait())
            yield await self._collect([a for a in attempts if a in self._futures])

    async def cancel(self, attempts: Sequence[Attempt]) -> None:
        """Forgets these attempts: their futures are cancelled and their end is not reported."""
        futures = [f for a in attempts for f in self._futures.pop(a, ())]
        if futures:
            await self._client.cancel(futures, reason="given up")

    async def close(self) -> None:
        """Cancels everything in flight."""
        for waiter in self._waiters:
            waiter.cancel()
        if self._client.status == "running":
            for topic in self._topics:
                self._client.unsubscribe_topic(topic)
        self._topics.clear()
        await self.cancel(list(self._futures))

    async def _wait(self, attempt: Attempt, score: Future) -> None:
        await score._state.wait()  # the future's end, without fetching its result one by one
        self._ended.put_nowait(attempt)

    async def _collect(self, attempts: list[Attempt]) -> list[Ended]:
        finished = [a for a in attempts if self._futures[a][1].status == "finished"]
        members = await self._client.gather([self._futures[a][1] for a in finished], errors="skip") if finished else []
        found = {m.receipt.attempt: m for m in members}
        ended = []
        for attempt in attempts:
            pair = self._futures.pop(attempt, None)
            if pair is None:
                continue  # cancelled while the results came
            _, score = pair
            error = None if attempt in found else await _error(score)
            ended.append(Ended(attempt, found.get(attempt), error, _cause(error)))
        return ended


def _cause(error: BaseException | None) -> Cause:
    """Whose fault an attempt's error is; what nobody is known to have caused is the machine's."""
    if isinstance(error, EpisodeFailed):
        return error.cause
    if isinstance(error, VerifierFailed):
        return "reward"
    return "generation" if isinstance(error, EngineError) else "machine"


async def _error(score: Future) -> BaseException:
    if score.status == "error":
        error = await score.exception()
        if error is not None:
            return error
    return RuntimeError(f"its future ended as {score.status}: the cluster lost or cancelled it")
