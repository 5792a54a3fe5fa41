"""Scoring, in a trajectory's own task or as a Dask task of its own; owns the run's verifiers in a reward worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker

from rollart.environments.calls import CallPool, CallTimedOut
from rollart.rewards.protocol import VerifierFailed
from rollart.rewards.registry import resolve, verify
from rollart.rollout.leaving import Leaving, unprepared
from rollart.rollout.raised import fit_to_travel
from rollart.rollout.reader import StoredTrajectories
from rollart.types import Member, Receipt, Score, Trajectory

PLUGIN = "reward"

LIMIT_S = 60.0
"""How long a verifier has for a trajectory."""


class RewardPlugin(WorkerPlugin):
    """Gives a worker of a reward class the run's store, the verifier of each task and the seconds that it has (`limits_s`; default: `LIMIT_S`).

    `told_topic`: where on the scheduler what the run's user should hear is told.
    """

    name = PLUGIN

    def __init__(
        self, run_url: str, storage_options: dict[str, Any], verifiers: dict[str, str], limits_s: Mapping[str, float] | None = None,
        told_topic: str = "told",
    ) -> None:  # fmt: skip
        self.run_url, self.storage_options, self.verifiers, self.limits_s = run_url, storage_options, verifiers, dict(limits_s or {})
        self.told_topic = told_topic
        self.ready = False

    async def setup(self, worker: Worker) -> None:
        leaving = Leaving(worker, self.told_topic, stuck=lambda: self.pool.waiting)
        self.pool = CallPool(unfit=leaving.watch_memory().begin)
        self.trajectories = StoredTrajectories(self.run_url, self.storage_options, keep=8)
        for name in self.verifiers.values():
            await asyncio.to_thread(resolve, name)  # imports what is slow to import now, and not while the first trajectory waits
        self.ready = True

    def teardown(self, worker: Worker) -> None:
        self.pool.close()


async def _plugin() -> RewardPlugin:
    """The worker's plugin; where setting it up has failed, the worker leaves, and the task goes on elsewhere."""
    plugin = get_worker().plugins.get(PLUGIN)
    if isinstance(plugin, RewardPlugin) and plugin.ready:
        return plugin
    await unprepared(get_worker(), "what scoring needs", plugin.told_topic if isinstance(plugin, RewardPlugin) else "told")


@fit_to_travel
async def score_task(receipt: Receipt) -> Member:
    """The score of the trajectory that the receipt names. VerifierFailed."""
    plugin = await _plugin()
    started, task = time.perf_counter(), receipt.attempt.episode.task
    trajectory = await asyncio.to_thread(plugin.trajectories.read, receipt)
    return await scored_within(plugin.limits_s.get(task, LIMIT_S), plugin.pool, plugin.verifiers[task], receipt, trajectory, started)


async def scored_within(
    limit_s: float, pool: CallPool, verifier: str, receipt: Receipt, trajectory: Trajectory, started: float | None = None
) -> Member:
    """What `scored` returns, called in a thread of `pool`; VerifierFailed too if that takes over `limit_s` seconds."""
    try:
        return await pool.run(partial(scored, verifier, receipt, trajectory, started), f"verifier {verifier!r}", limit_s, lambda call: None)
    except CallTimedOut as error:
        raise VerifierFailed(f"{error} on {receipt.attempt} (tasks.{receipt.attempt.episode.task}.reward_timeout)") from error


def scored(verifier: str, receipt: Receipt, trajectory: Trajectory, started: float | None = None) -> Member:
    """The trajectory's score, with the receipt that it belongs to: the two carry one nonce, so executions never mix. It took the seconds since
    `started` (on `time.perf_counter`; default: now)."""
    started = time.perf_counter() if started is None else started
    verdict = verify(verifier, trajectory)
    return Member(receipt, Score(receipt.attempt, receipt.nonce, verdict.value, verdict.parts, verdict.reason, time.perf_counter() - started))
