"""A verifier that does not return: an error of the reward's after its limit, on a real worker, which leaves once too many hang in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.environments import calls
from rollart.environments.calls import CallPool
from rollart.rewards.protocol import Verdict, VerifierFailed
from rollart.rewards.worker import RewardPlugin, score_task, scored_within
from rollart.rollout import records
from rollart.types import Attempt, Episode, Receipt, Segment, Trajectory
from storage.objects.store import ObjectStore
from tests.one_worker import one_worker

PATIENCE_S = 20.0

HANGING = f"{__name__}:hanging"
GOOD = f"{__name__}:good"
free = threading.Event()


def hanging(trajectory: Trajectory) -> Verdict:
    free.wait(PATIENCE_S)
    return Verdict(1.0)


def good(trajectory: Trajectory) -> Verdict:
    return Verdict(0.25)


def played(task: str) -> tuple[Trajectory, Receipt]:
    attempt, segment = Attempt(Episode(task, 0), 0), Segment()
    segment.append_prompt([1])
    segment.append_response([2], [-0.5], [0], "stop")
    receipt = Receipt(attempt, task, 0, f"{records.FLUSHED}/{task}.parquet", 0, "terminated", 0, 0, 2, 1, 1)
    return Trajectory(attempt, task, 0, 0, [segment], "terminated"), receipt


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    free.clear()
    yield
    free.set()


async def test_a_verifier_that_does_not_return_is_an_error_that_names_its_limit() -> None:
    trajectory, receipt = played("sum")
    pool = CallPool(threads=1)
    with pytest.raises(VerifierFailed, match=r"verifier '.*:hanging' took longer than 0.05 s on train/sum/0/0/0 \(tasks.sum.reward_timeout\)"):
        await scored_within(0.05, pool, HANGING, receipt, trajectory)
    assert (await scored_within(PATIENCE_S, pool, GOOD, receipt, trajectory)).score.value == 0.25  # another thread took its place


async def test_a_reward_worker_goes_on_beside_a_verifier_that_hangs_and_leaves_when_too_many_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "STUCK_S", 0.05)
    plugin = RewardPlugin(str(tmp_path), {}, {"sum": HANGING, "guess": GOOD}, {"sum": 0.05}, "told-run-0")
    receipts = []
    for trajectory, receipt in (played("sum"), played("guess")):
        ObjectStore(str(tmp_path)).write(receipt.file, records.encode([trajectory]))
        receipts.append(receipt)
    bad, fine = receipts
    async with one_worker("judge-0", {"JUDGE": 4}, "told-run-0") as here:
        worker, client, told = here.worker, here.client, here.told
        await worker.plugin_add(plugin, name=plugin.name)
        plugin.pool._most_left = 2

        async def score(receipt: Receipt, key: str) -> float:
            return (await client.submit(score_task, receipt, key=key, resources={"JUDGE": 1}, pure=False)).score.value

        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(VerifierFailed, match="reward_timeout"):
                await score(bad, "first")
            assert await score(fine, "beside") == 0.25
            with pytest.raises(VerifierFailed, match="reward_timeout"):
                await score(bad, "second")
            assert "worker judge-0 leaves (2 calls have not come back, the last: verifier" in await told.get()
            await worker.finished()
