"""Scoring as a Dask task; owns the run's verifiers in a reward worker."""

from __future__ import annotations

import time
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker

from rollart.rewards.registry import resolve, verify
from rollart.rollout.reader import StoredTrajectories
from rollart.types import Member, Receipt, Score

PLUGIN = "reward"


class RewardPlugin(WorkerPlugin):
    """Gives a worker of a reward class the run's store and the verifier of each task."""

    name = PLUGIN

    def __init__(self, run_url: str, storage_options: dict[str, Any], verifiers: dict[str, str]) -> None:
        self.run_url, self.storage_options, self.verifiers = run_url, storage_options, verifiers

    def setup(self, worker: Worker) -> None:
        self.trajectories = StoredTrajectories(self.run_url, self.storage_options, keep=8)
        for name in self.verifiers.values():
            resolve(name)  # imports what is slow to import now, and not while the first trajectory waits


def score_task(receipt: Receipt) -> Member:
    """The trajectory's score, with the receipt that it belongs to: the two carry one nonce, so executions never mix."""
    started = time.perf_counter()
    plugin: RewardPlugin = get_worker().plugins[PLUGIN]
    verdict = verify(plugin.verifiers[receipt.attempt.episode.task], plugin.trajectories.read(receipt))
    return Member(receipt, Score(receipt.attempt, receipt.nonce, verdict.value, verdict.parts, verdict.reason, time.perf_counter() - started))
