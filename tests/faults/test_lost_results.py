"""A worker that dies with the results of trajectories that it has played: Dask runs their tasks again, and nothing is played again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

from benchmarks.byte_policy import byte_policy
from rollart.control.staleness import StalenessWindow
from rollart.environments.protocol import StepResult
from rollart.rewards.worker import RewardPlugin
from rollart.rollout.dispatcher import Dispatcher
from rollart.rollout.episode import Limits
from rollart.rollout.records import FLUSHED, read_table
from rollart.rollout.window import SubmissionWindow
from rollart.rollout.worker import EnvironmentPlugin, RolloutPlan, TaskPlan, trajectory_task
from rollart.types import Attempt, Episode, Member, SamplingTransform
from storage.objects.store import ObjectStore

PATIENCE_S = 60.0

pytestmark = pytest.mark.timeout(200)


class Noted:
    """Notes each time that it is played."""

    def __init__(self, log: str) -> None:
        self._log = Path(log)

    async def reset(self, seed: int) -> str:
        self._log.write_text(f"{self._log.read_text()}{os.getpid()}\n")
        return "say x"

    async def step(self, action: str) -> StepResult:
        return StepResult("", 1.0, terminated=True)

    async def close(self) -> None:
        return None

    def script(self, rng: Any) -> str:
        return "x"


@dataclass
class Players:
    """Two environment workers, each a process of its own, that play the tasks `apart` (scored elsewhere) and `here`."""

    client: Client
    scheduler: str
    log: Path
    store: ObjectStore

    def played(self) -> list[str]:
        return self.log.read_text().split()

    def recorded(self) -> list[str]:
        """Nonces of all executions that stand in the store."""
        return [nonce for path in self.store.list(FLUSHED) for nonce in read_table(self.store, path, ["nonce"])["nonce"].to_pylist()]

    async def kill_who_has(self, key: str) -> None:
        """Waits for the result of a task, and kills the worker that has it."""
        async with asyncio.timeout(PATIENCE_S):
            while not (having := (await self.client.scheduler.who_has(keys=[key]))[key]):  # noqa: ASYNC110 - told when asked
                await asyncio.sleep(0.02)
        (address,) = having
        (pid,) = (await self.client.run(os.getpid, workers=[address])).values()
        assert self.played() == [str(pid)]
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
async def players(tmp_path: Path) -> AsyncIterator[Players]:
    log, run = tmp_path / "played", tmp_path / "run"
    log.touch()
    tasks = {
        name: TaskPlan(f"{__name__}:Noted", {"log": str(log)}, Limits(1, 4, 64), SamplingTransform(), "loop", "GENERATE", verifier=verifier)
        for name, verifier in (("apart", None), ("here", "environment"))
    }
    plan = RolloutPlan(str(run), {}, byte_policy(tmp_path / "policy"), 0, 0, StalenessWindow(1), tasks, SamplingTransform(), flush_s=0.01)
    options = {"nthreads": 2, "resources": {"PLAY": 1}, "host": "127.0.0.1", "dashboard": False, "local_directory": str(tmp_path / "scratch")}
    workers = {name: {"cls": Nanny, "options": options} for name in ("one", "two")}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard": False}}
    async with (
        SpecCluster(workers=workers, scheduler=scheduler, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2, timeout=PATIENCE_S)
        await client.register_plugin(EnvironmentPlugin(plan))
        yield Players(client, cluster.scheduler_address, log, ObjectStore(str(run)))


async def test_a_trajectory_whose_worker_dies_before_it_is_scored_is_scored_as_it_was_first_played(players: Players) -> None:
    attempt = Attempt(Episode("apart", 0, "warm_up"), 0)
    dispatcher = Dispatcher(players.client, {"apart": ("PLAY", "JUDGE")}, "lost", SubmissionWindow({"PLAY": 2}))
    dispatcher.dispatch([attempt])
    await players.kill_who_has(dispatcher.keys()[attempt][0])
    async with Worker(players.scheduler, resources={"JUDGE": 1}, dashboard=False) as judge:
        await judge.plugin_add(RewardPlugin(players.store.url, {}, {"apart": "environment"}), name=RewardPlugin.name)
        ended = await asyncio.wait_for(anext(aiter(dispatcher.ended())), PATIENCE_S)
    await dispatcher.close()
    (member,) = [end.member for end in ended]
    assert member is not None and member.score.value == 1.0
    assert [member.receipt.nonce] == players.recorded()
    assert len(players.played()) == 1


async def test_a_trajectory_whose_worker_dies_with_its_score_is_scored_as_it_was_first_played(players: Players) -> None:
    attempt, key = Attempt(Episode("here", 0, "warm_up"), 0), "trajectory-here-0"
    future = players.client.submit(trajectory_task, attempt, key, time.time(), key=key, resources={"PLAY": 1}, pure=False, retries=0)
    await players.kill_who_has(key)
    member = await asyncio.wait_for(future, PATIENCE_S)
    assert isinstance(member, Member) and member.score.value == 1.0
    assert [member.receipt.nonce] == players.recorded()
    assert len(players.played()) == 1
