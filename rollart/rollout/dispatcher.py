"""Sends attempts to the cluster as futures and reports how each ended; owns futures and keys, decides nothing about them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from distributed import Client, Future

from rollart.control.failures import Cause
from rollart.control.silence import at_work, tell
from rollart.engines.errors import EngineError
from rollart.rewards.protocol import VerifierFailed
from rollart.rewards.worker import score_task
from rollart.rollout.episode import EpisodeFailed
from rollart.rollout.whereabouts import look
from rollart.rollout.window import SubmissionWindow
from rollart.rollout.worker import trajectory_task
from rollart.types import Attempt, Episode, Member

TOGETHER_S = 0.005
"""How long an end waits for others, to be fetched with them."""


Place = tuple[str, str | None]
"""The resource of an attempt's environment and that of its reward, None where scores come with the trajectories."""


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
    """Each trajectory is one future on its environment's class; its score comes with it, or is a second future on the reward class.

    `resources`: task -> (environment class's resource, reward class's, or None where scores come with the trajectories), looked up anew for
    what is dispatched; `sent` counts by both what went where. Keys carry run, lineage and attempt, since equal keys on a shared scheduler return
    another's result. `window` holds back what the cluster has no room for.
    """

    def __init__(self, client: Client, resources: Mapping[str, Place], namespace: str, window: SubmissionWindow) -> None:
        self._client, self._resources, self.namespace, self._window = client, resources, namespace, window
        self.last_end = time.monotonic()
        self.sent: Counter[tuple[str, Place]] = Counter()
        self._places: dict[Attempt, Place] = {}
        self._futures: dict[Attempt, tuple[Future, ...]] = {}
        self._playing: set[Attempt] = set()
        self._over: list[Attempt] = []
        self._waiters: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Queue[list[Ended] | Exception] = asyncio.Queue()
        self._topics: list[str] = []
        self._goes_out: Callable[[list[Attempt]], None] = lambda attempts: None

    @property
    def in_flight(self) -> int:
        """Attempts dispatched whose end has not been reported."""
        return len(self._futures)

    def keys(self) -> dict[Attempt, list[str]]:
        """The attempts in flight with the keys of each one's Dask tasks, first to last; none while it waits for room."""
        return {attempt: [future.key for future in futures] for attempt, futures in self._futures.items()}

    def waiting(self) -> list[Attempt]:
        """The attempts in flight that wait for room: they have not gone to the cluster yet."""
        return [attempt for attempt, futures in self._futures.items() if not futures]

    def held(self) -> dict[str, int]:
        """How many attempts wait for room, by the resource that they want."""
        return dict(Counter(self._places[attempt][0] for attempt in self.waiting()))

    def waiting_for(self, resource: str) -> list[Attempt]:
        """The attempts in flight that can't end without a worker of `resource`."""
        return [a for a, futures in self._futures.items() if self._lacks(self._places[a], futures, resource)]

    async def at_work(self, attempts: Sequence[Attempt], within_s: float) -> list[Attempt]:
        """Those of the attempts that are taken care of, see `control.silence.at_work`; all of them if the scheduler does not answer, of which
        others hear."""
        keys = self.keys()
        try:
            return at_work(await look(self._client, {a: keys[a] for a in attempts if a in keys}), within_s)
        except TimeoutError:
            return list(attempts)

    async def whereabouts(self) -> str:
        """Where the attempts in flight are, and what is done with them, in words."""
        try:
            return "; ".join(tell(await look(self._client, self.keys()))) or "nothing is in flight"
        except TimeoutError:
            return "the Dask scheduler does not answer"

    def follow(self, topic: str, begun: Callable[[list[Attempt]], None]) -> None:
        """Calls `begun` with attempts in flight that the workers say, on `topic`, have begun to sample."""

        def heard(event: tuple[float, list[tuple[str, int, int, int]]]) -> None:
            told = [Attempt(Episode(task, index), member, number) for task, index, member, number in event[1]]
            begun([attempt for attempt in told if attempt in self._futures])

        self._client.subscribe_topic(topic, heard)
        self._topics.append(topic)

    def hear(self, goes_out: Callable[[list[Attempt]], None]) -> None:
        """Has `goes_out` called with attempts as they go to the cluster."""
        self._goes_out = goes_out

    def dispatch(self, attempts: Sequence[Attempt]) -> None:
        """Starts these attempts of one task, as the window lets them; those that go out together are one graph, so that a group costs the
        scheduler little more than one task."""
        if not self._futures:
            self.last_end = time.monotonic()  # what nobody waited for was no silence
        task = attempts[0].episode.task
        place = self._resources[task]
        self.sent[task, place] += len(attempts)
        self._places |= dict.fromkeys(attempts, place)
        self._futures |= dict.fromkeys(attempts, ())
        self._window.submit(place[0], attempts, self._submit)

    def _submit(self, attempts: list[Attempt]) -> None:
        self._goes_out(attempts)
        for (task, place), alike in groupby(attempts, lambda a: (a.episode.task, self._places[a])):
            self._map(task, place, list(alike))

    def _map(self, task: str, place: Place, attempts: list[Attempt]) -> None:
        environment, reward = place
        label = re.sub("[^a-zA-Z]", "", task)
        # The attempt first: the dashboard's name of a task goes on over words of letters, and a run's name may begin with one.
        names = [f"{a}-{self.namespace}" for a in attempts]
        keys = [f"trajectory-{label}-{n}" for n in names]
        sent = [time.time()] * len(attempts)
        trajectories = self._client.map(trajectory_task, attempts, keys, sent, key=keys, resources={environment: 1}, pure=False, retries=0)
        futures: list[tuple[Future, ...]] = [(trajectory,) for trajectory in trajectories]
        if reward is not None:
            rewards = [f"reward-{label}-{n}" for n in names]
            scores = self._client.map(score_task, trajectories, key=rewards, resources={reward: 1}, pure=False, retries=0)
            futures = list(zip(trajectories, scores, strict=True))
        for attempt, of_attempt in zip(attempts, futures, strict=True):
            self._futures[attempt] = of_attempt
            self._playing.add(attempt)
            self._beside(self._wait(attempt, of_attempt))

    async def ended(self, stall_s: float | None = None) -> AsyncIterator[list[Ended]]:
        """Attempts as they end, all that have ended at a time; goes on for ever. Stalled after `stall_s` seconds without any."""
        while True:
            try:
                found = [await asyncio.wait_for(self._ended.get(), stall_s)]
            except TimeoutError:
                raise Stalled(
                    f"no trajectory has ended for {stall_s:.0f} s (run.step_timeout); {self.in_flight} in flight, such as "
                    f"{next(iter(self._futures), 'none')}; look at the workers' logs: {await self.whereabouts()}"
                ) from None
            while not self._ended.empty():
                found.append(self._ended.get_nowait())
            for part in found:
                if isinstance(part, Exception):
                    raise part
            yield [end for part in found if not isinstance(part, Exception) for end in part]

    async def cancel(self, attempts: Sequence[Attempt]) -> None:
        """Forgets these attempts: their futures are cancelled and their end is not reported."""
        if not attempts:
            return
        self._window.withdraw(set(attempts), self._submit)
        futures = [f for a in attempts for f in self._futures.pop(a, ())]
        self._forget(attempts)
        if futures:
            await self._client.cancel(futures, reason="given up")

    async def fail(self, attempts: Sequence[Attempt], error: BaseException) -> None:
        """Takes these attempts back, and reports those of them that were in flight as ended in `error`."""
        ended = [Ended(a, None, error, _cause(error)) for a in attempts if a in self._futures]
        await self.cancel([end.attempt for end in ended])
        if ended:
            self._ended.put_nowait(ended)

    async def close(self) -> None:
        """Cancels everything in flight."""
        for waiter in self._waiters:
            waiter.cancel()
        if self._client.status == "running":
            for topic in self._topics:
                self._client.unsubscribe_topic(topic)
        self._topics.clear()
        await self.cancel(list(self._futures))
        for attempt in list(self._playing):
            self._leave(attempt)

    # ---- inside

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._waiters.add(task)
        task.add_done_callback(self._waiters.discard)

    def _leave(self, attempt: Attempt) -> None:
        """Its trajectory's future is over, whatever became of it: another may go out."""
        if attempt in self._playing:
            self._playing.remove(attempt)
            self._window.ended(self._places[attempt][0])
            self._forget([attempt])

    def _forget(self, attempts: Sequence[Attempt]) -> None:
        """Of what is over and was reported, or never will be, nothing is kept."""
        for attempt in attempts:
            if attempt not in self._playing and attempt not in self._futures:
                self._places.pop(attempt, None)

    def _lacks(self, place: Place, futures: tuple[Future, ...], resource: str) -> bool:
        environment, reward = place
        played, over = bool(futures) and futures[0].done(), bool(futures) and futures[-1].done()
        return (environment == resource and not played) or (reward == resource and not over)

    async def _wait(self, attempt: Attempt, futures: tuple[Future, ...]) -> None:
        await futures[0]._state.wait()  # the future's end, without fetching its result one by one
        self._leave(attempt)
        await futures[-1]._state.wait()
        if not self._over:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._fetch)
        self._over.append(attempt)

    def _fetch(self) -> None:
        """Fetches what has ended in work of its own: a result that was lost with its worker, and is computed anew, holds up no later one."""
        attempts, self._over = [a for a in self._over if a in self._futures], []
        if attempts:
            self._beside(self._collect(attempts))

    async def _collect(self, attempts: list[Attempt]) -> None:
        try:
            self._ended.put_nowait(await self._results(attempts))
            self.last_end = time.monotonic()
        except Exception as error:  # noqa: BLE001 - raised by `ended`
            self._ended.put_nowait(error)

    async def _results(self, attempts: list[Attempt]) -> list[Ended]:
        attempts = [a for a in attempts if a in self._futures]  # one may have been cancelled since it ended
        finished = [self._futures[a][-1] for a in attempts if self._futures[a][-1].status == "finished"]
        members = await self._client.gather(finished, errors="skip") if finished else []
        found = {m.receipt.attempt: m for m in members}
        ended = []
        for attempt in attempts:
            futures = self._futures.pop(attempt, None)
            if futures is None:
                continue  # cancelled while the results came
            error = None if attempt in found else await _error(futures[-1])
            ended.append(Ended(attempt, found.get(attempt), error, _cause(error)))
        self._forget(attempts)
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
