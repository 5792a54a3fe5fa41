"""Asks the scheduler and the workers where attempts are and what is done with them; owns the questions, decides nothing about the answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Client, Scheduler, Worker

from rollart.control.silence import Placed, Whereabouts, place
from rollart.types import Attempt

ANSWER_S = 5.0
"""How long the scheduler, or a worker, has for an answer: after that it does not answer."""

WAITING = ("waiting", "ready", "constrained")
"""States of a task that a worker has and has not begun."""


async def look(client: Client, keys: Mapping[Attempt, Sequence[str]]) -> list[Whereabouts]:
    """Where these attempts are, given the keys of each one's Dask tasks, first to last. TimeoutError if the scheduler does not answer."""
    asked = [key for of_attempt in keys.values() for key in of_attempt]
    placed, resources, names = await asyncio.wait_for(client.run_on_scheduler(_placed, asked), ANSWER_S)
    found: list[Whereabouts] = []
    at_workers: defaultdict[str, dict[str, Attempt]] = defaultdict(dict)
    for attempt, of_attempt in keys.items():
        where = place(attempt, of_attempt, placed, resources)
        if isinstance(where, Whereabouts):
            found.append(where)
        else:
            address, key = where
            at_workers[address][key] = attempt
    told = await asyncio.gather(*(_ask(client, address, names.get(address, address), wanted) for address, wanted in at_workers.items()))
    return found + [each for of_worker in told for each in of_worker]


async def missing(client: Client, namespaces: Sequence[str], held: Mapping[str, int]) -> dict[str, int]:
    """How many tasks wait in vain for each resource that no worker has: those whose keys end in one of `namespaces`, and those that are
    `held` back for it. TimeoutError as above."""
    found, there = await asyncio.wait_for(client.run_on_scheduler(_waiting, tuple(namespaces)), ANSWER_S)
    return dict(Counter(found) + Counter({resource: tasks for resource, tasks in held.items() if resource not in there}))


def doing_of(worker: Worker, key: str, attempt: Attempt) -> tuple[str, float]:
    """What one of the worker's plugins does with an attempt, in words, and for how many seconds by now; empty if none says."""
    for plugin in worker.plugins.values():
        if (say := getattr(plugin, "doing", None)) is not None and (said := say(attempt)) is not None:
            return said
    task = worker.state.tasks.get(key)
    return "", time.time() - task.start_time if task is not None and task.start_time else 0.0


async def _ask(client: Client, address: str, name: str, wanted: dict[str, Attempt]) -> list[Whereabouts]:
    try:
        answers = await asyncio.wait_for(client.run(_doing, wanted, workers=[address], on_error="return"), ANSWER_S)
    except TimeoutError:
        answers = {}
    answer = answers.get(address)
    if not isinstance(answer, dict):
        return [Whereabouts(attempt, "unanswered", name) for attempt in wanted.values()]
    return [Whereabouts(attempt, kind, where or name, doing, seconds) for attempt, (kind, where, doing, seconds) in answer.items()]


async def _doing(wanted: dict[str, Attempt], dask_worker: Worker) -> dict[Attempt, Any]:
    """On a worker: what it does with these tasks. A coroutine, since plain functions may be moved to a thread."""
    found: dict[Attempt, Any] = {}
    for key, attempt in wanted.items():
        task = dask_worker.state.tasks.get(key)
        if task is None:
            found[attempt] = ("lost", "its resource", "", 0.0)
        elif task.state in WAITING:
            found[attempt] = ("queued", "", "", 0.0)
        elif task.state in ("memory", "error"):
            found[attempt] = ("ended", "", "", 0.0)
        else:
            found[attempt] = ("working", "", *doing_of(dask_worker, key, attempt))
    return found


def _placed(keys: list[str], dask_scheduler: Scheduler) -> tuple[dict[str, Placed], set[str], dict[str, str]]:
    """On the scheduler: where it has these tasks, which resources there are, and what the workers are called."""
    placed = {}
    for key in keys:
        task = dask_scheduler.tasks.get(key)
        if task is not None:
            given = task.processing_on.address if task.processing_on is not None else None
            placed[key] = Placed(task.state, given, next(iter(task.resource_restrictions or ()), ""))
    names = {address: str(worker.name) for address, worker in dask_scheduler.workers.items()}
    return placed, _resources(dask_scheduler), names


def _waiting(namespaces: tuple[str, ...], dask_scheduler: Scheduler) -> tuple[dict[str, int], set[str]]:
    """On the scheduler, which has its tasks without a worker in one place: how many of ours lack which resource, and the resources there are."""
    there = _resources(dask_scheduler)
    found: Counter[str] = Counter()
    for task in dask_scheduler.unrunnable:
        if isinstance(task.key, str) and task.key.endswith(namespaces):
            found.update(set(task.resource_restrictions or ()) - there)
    return dict(found), there


def _resources(scheduler: Scheduler) -> set[str]:
    """Resources that a worker has which takes tasks."""
    return {resource for worker in scheduler.running for resource, supply in worker.resources.items() if supply >= 1}
