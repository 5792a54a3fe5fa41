"""Coordinators are told apart by number: on the scheduler an earlier one sets no workers up, and a worker hears its own alone."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from distributed import Client, Scheduler, Worker

from rollart.engines.fleet import EngineFleet
from rollart.engines.host import EngineHost, EngineSettings
from rollart.engines.router import EngineTable
from rollart.fence import SchedulerInUse, Superseded, admit, claim, is_newest
from rollart.training.handle import Trainer
from rollart.training.settings import LearnerSettings
from rollart.training.worker import LearnerPlugin
from storage.version import Version


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Of a scheduler and a worker of every class, in this process."""
    async with (
        Scheduler(protocol="inproc", dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=2, resources={"TRAIN": 1, "GENERATE": 1, "PLAY": 1}, dashboard=False),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        yield client


def test_who_is_not_the_hearers_own_is_refused_by_both_numbers() -> None:
    admit(7, 7)
    with pytest.raises(Superseded, match=r"^coordinator 7 of this run is superseded by coordinator 12:") as refused:
        admit(7, 12)
    with pytest.raises(Superseded, match=r"^this worker was set up by coordinator 7, before coordinator 12 took the run over"):
        admit(12, 7)
    assert str(cloudpickle.loads(cloudpickle.dumps(refused.value))) == str(refused.value)


async def test_an_earlier_coordinator_of_a_run_sets_no_workers_up_on_the_scheduler_of_a_later_one(client: Client) -> None:
    await client.run_on_scheduler(claim, "runs/b", 7, "a client that has gone")  # another run's numbers say nothing
    await client.run_on_scheduler(claim, "runs/a", 3, client.id)
    await client.run_on_scheduler(claim, "runs/a", 3, client.id)
    assert await client.run_on_scheduler(partial(is_newest, "runs/a", 3))
    await client.run_on_scheduler(claim, "runs/a", 8, client.id)
    with pytest.raises(Superseded, match="coordinator 3 of this run is superseded by coordinator 8"):
        await client.run_on_scheduler(claim, "runs/a", 3, client.id)
    assert not await client.run_on_scheduler(partial(is_newest, "runs/a", 3))
    assert await client.run_on_scheduler(partial(is_newest, "runs/a", 8))


async def test_a_run_sets_no_workers_up_on_a_scheduler_on_which_another_is_open(client: Client) -> None:
    async with Client(client.scheduler.address, asynchronous=True) as other:
        await client.run_on_scheduler(claim, "runs/a", 0, other.id)
        with pytest.raises(SchedulerInUse, match="runs/a is open on this scheduler, and a run sets up all of its workers; wait"):
            await client.run_on_scheduler(claim, "runs/b", 0, client.id)
        await client.run_on_scheduler(claim, "runs/a", 1, client.id)  # its own next coordinator may take it over
    await client.run_on_scheduler(claim, "runs/a", 2, "a client that has gone")
    await client.run_on_scheduler(claim, "runs/b", 0, client.id)


async def test_a_training_worker_does_what_its_own_coordinator_asks_and_nobody_else(client: Client, tmp_path: Path) -> None:
    read = re.compile("").findall  # never called
    await client.register_plugin(
        LearnerPlugin(str(tmp_path), LearnerSettings(), read, weights_url=str(tmp_path / "w"), checkpoints_url=str(tmp_path / "c"), coordinator=5)
    )
    (address,) = (await client.scheduler.identity())["workers"]
    earlier, later = (Trainer(client, address, "TRAIN", f"n{number}", number) for number in (4, 9))
    for call in (
        earlier.begin(), earlier.publish(Version(0, 0), None, {}), earlier.checkpoint(Version(0, 0), {}), earlier.resume(),
    ):  # fmt: skip
        with pytest.raises(Superseded, match="coordinator 4 of this run is superseded by coordinator 5"):
            await call
    with pytest.raises(Superseded, match="set up by coordinator 5, before coordinator 9"):
        await later.begin()
    assert await earlier.run("anything", int, "7") == 7  # what is done before any coordinator sets a worker up


async def test_an_engine_host_serves_what_its_own_coordinator_says_and_nobody_else(client: Client, tmp_path: Path) -> None:
    host = EngineHost(EngineSettings(str(tmp_path)), str(tmp_path), hardware_classes=["none of this worker's"], coordinator=5)
    await client.register_plugin(host)
    fleet = EngineFleet(client, frozenset({"GENERATE"}), frozenset({"PLAY"}), 4)
    with pytest.raises(Superseded, match="coordinator 4 of this run is superseded by coordinator 5"):
        await fleet.serve(Version(0, 0))
    await fleet.close()
    assert fleet.table == EngineTable(coordinator=4)
