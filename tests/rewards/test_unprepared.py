"""A reward worker on which what scoring needs could not be set up: it leaves, and fails none of the scores that came to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from distributed import Worker

from rollart.rewards.worker import RewardPlugin, score_task
from rollart.rollout import records
from rollart.types import Attempt, Episode, Receipt, Segment, Trajectory
from storage.objects.store import ObjectStore
from tests.one_worker import one_worker

PATIENCE_S = 60.0


def played(store: ObjectStore) -> Receipt:
    """A trajectory in the store, whose environment rewarded it with 0.25."""
    attempt, segment = Attempt(Episode("lake", 0), 0), Segment()
    segment.append_prompt([1])
    segment.append_response([2], [-0.5], [0], "stop")
    segment.reward_last_turn(0.25)
    file = f"{records.FLUSHED}/one.parquet"
    store.write(file, records.encode([Trajectory(attempt, "nonce", 0, 0, [segment], "terminated")]))
    return Receipt(attempt, "nonce", 0, file, 0, "terminated", 0, 0, 2, 1, 1)


async def test_a_worker_whose_verifier_cannot_be_imported_leaves_and_its_scores_go_on_elsewhere(tmp_path: Path) -> None:
    receipt = played(ObjectStore(str(tmp_path)))
    async with one_worker("first", {"JUDGE": 4}, "told-run-0") as here:
        scheduler, first, client, told = here.scheduler, here.worker, here.client, here.told
        await first.plugin_add(RewardPlugin(str(tmp_path), {}, {"lake": "not_installed_here:verdict"}, told_topic="told-run-0"), name="reward")
        scores = [client.submit(score_task, receipt, key=f"score-{i}", resources={"JUDGE": 1}, pure=False) for i in range(6)]
        async with asyncio.timeout(PATIENCE_S):
            assert "worker first leaves (what scoring needs could not be set up; its log says why)" in await told.get()
            await first.finished()
            good = RewardPlugin(str(tmp_path), {}, {"lake": "environment"})
            async with Worker(scheduler.address, name="second", nthreads=8, resources={"JUDGE": 4}, plugins=(good,), dashboard=False):
                assert [m.score.value for m in await client.gather(scores)] == [0.25] * 6
