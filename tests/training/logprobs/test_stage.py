"""The stage on real workers of its own, beside those that train: through the handles that a flow uses, with real stores."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

from rollart.cluster import workers_of
from rollart.training.batch_share import train_share
from rollart.training.errors import BatchError, LogprobsError, LogprobsLost
from rollart.training.handle import Trainer
from rollart.training.learner import Learner
from rollart.training.logprobs.stage import LogprobStage
from rollart.training.logprobs.worker import LogprobPlugin, LogprobShare, logprobs_task
from rollart.training.metrics import StepMetrics
from rollart.training.ranks import ALONE
from rollart.training.settings import LearnerSettings
from rollart.training.trainer_group import TrainerGroup
from rollart.training.worker import LearnerPlugin
from rollart.types import Receipt, Trajectory, Version
from storage.weights import WeightStore
from tests.training.conftest import make_trajectories_of
from tests.training.test_ranks import batch_of

SETTINGS = LearnerSettings.model_validate(
    {
        "model": {"dtype": "float64"}, "optimiser": {"lr": 0.02}, "batch": {"minibatches": 2, "token_budget": 60}, "loss": {"kl": 0.3},
        "advantage": {"name": "rloo"},
    }
)  # fmt: skip
TRAJECTORIES = make_trajectories_of((4, 3, 3))
BATCHES = [batch_of(TRAJECTORIES, step, range(10)) for step in range(3)]
START = Version(0, 0)


@dataclass
class Reader:
    """Reads trajectories from a list, by row; the first process that is to read while `trap` exists takes it away, and dies."""

    trajectories: list[Trajectory]
    trap: Path | None = None

    def __call__(self, receipts: Sequence[Receipt]) -> list[Trajectory]:
        if self.trap is not None and self.trap.exists():
            self.trap.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [self.trajectories[r.row] for r in receipts]


@dataclass
class Place:
    """What the tests share: a cluster, and where versions and checkpoints go."""

    client: Client
    folder: Path
    model: Path

    async def addresses(self, resource: str) -> list[str]:
        return [w.address for w in await workers_of(self.client) if resource in w.resources]

    async def trainer(self, ranks: int) -> Trainer:
        """A trainer of that many ranks, whose first version is published, with nothing of the reference in it."""
        await self._register("TRAIN", LearnerPlugin(
            str(self.model), SETTINGS, Reader(TRAJECTORIES), weights_url=self.weights.url, checkpoints_url=str(self.folder / "checkpoints"),
            elsewhere=True,
        ))  # fmt: skip
        addresses = await self.addresses("TRAIN")
        made = Trainer(self.client, addresses[0], "TRAIN", "test") if ranks == 1 else TrainerGroup(self.client, addresses, "TRAIN", "test", SETTINGS)
        await made.open()
        return made

    async def stage(self, patience_s: float = 60.0, wait_s: float = 60.0, trap: Path | None = None) -> LogprobStage:
        await self._register(
            "SCORE", LogprobPlugin(str(self.model), SETTINGS, Reader(TRAJECTORIES, trap), weights_url=self.weights.url, wait_s=wait_s)
        )
        return LogprobStage(self.client, "SCORE", "test", START, patience_s)

    async def _register(self, resource: str, plugin: Any) -> None:
        from rollart.opening import ForClass

        await self.client.register_plugin(ForClass(frozenset({resource}), plugin))

    @property
    def weights(self) -> WeightStore:
        return WeightStore(str(self.folder / "weights"))

    async def kill(self, address: str) -> None:
        pids = await self.client.run(os.getpid, workers=[address])
        os.kill(pids[address], signal.SIGKILL)


@asynccontextmanager
async def _cluster(model: Path, folder: Path, kind: type, named: dict[str, int]) -> AsyncIterator[Place]:
    """So many workers of each resource, as processes or in this one."""

    def options(resource: str) -> dict[str, Any]:
        return {"nthreads": 3, "resources": {resource: 1}, "memory_limit": 0, "local_directory": str(folder), "dashboard": False}

    workers = {f"{r}-{i}": {"cls": kind, "options": options(r)} for r, count in named.items() for i in range(count)}
    async with (
        SpecCluster(workers=workers, scheduler={"cls": Scheduler, "options": {"dashboard": False, "port": 0}}, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        yield Place(client, folder, model)


@pytest_asyncio.fixture
async def place(gpt2: Path, tmp_path: Path) -> AsyncIterator[Place]:
    async with _cluster(gpt2, tmp_path, Worker, {"TRAIN": 1, "SCORE": 2}) as place:
        yield place


@pytest_asyncio.fixture
async def processes(gpt2: Path, tmp_path: Path) -> AsyncIterator[Place]:
    async with _cluster(gpt2, tmp_path, Nanny, {"TRAIN": 2, "SCORE": 2}) as place:
        yield place


async def _step(stage: LogprobStage, trainer: Trainer, step: int) -> StepMetrics:
    """As a session takes it: the version is published while the stage is at work already."""
    async with stage.of(BATCHES[step]) as found:
        ready = asyncio.create_task(found.ready())
        await trainer.publish(Version(0, step), None, {})
        await ready
        return await found.beside(trainer.train(BATCHES[step], False, found.futures))


def _alone(model: Path, steps: int) -> tuple[Learner, list[StepMetrics]]:
    learner = Learner(model, SETTINGS)
    return learner, [learner.train_step(train_share(batch, SETTINGS, Reader(TRAJECTORIES), ALONE)) for batch in BATCHES[:steps]]


async def _assert_trains_as_alone(place: Place, ranks: int) -> None:
    learner, expected = _alone(place.model, 3)
    trainer, stage = await place.trainer(ranks), await place.stage()
    found = [await _step(stage, trainer, step) for step in range(3)]
    for theirs, ours in zip(found, expected, strict=True):
        assert (theirs.loss, theirs.kl) == (pytest.approx(ours.loss, rel=1e-9, abs=1e-11), pytest.approx(ours.kl, rel=1e-9, abs=1e-11))
        assert (theirs.optimiser_steps, theirs.tokens) == (2, ours.tokens)
    await trainer.publish(Version(0, 3), None, {})
    weights = place.weights.pull(Version(0, 3))
    assert all(torch.allclose(value, weights[name], rtol=0, atol=1e-11) for name, value in learner.weights().items())
    assert place.weights.tags() == {"reference": START}  # which keeps it, however many versions come


async def test_a_trainer_trains_as_with_passes_of_its_own(place: Place) -> None:
    await _assert_trains_as_alone(place, 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_each_rank_takes_its_own_share_of_what_the_stage_computed(processes: Place) -> None:
    await _assert_trains_as_alone(processes, 2)


async def test_a_batch_is_dealt_out_to_all_workers_of_the_class(place: Place) -> None:
    trainer, stage = await place.trainer(1), await place.stage()
    await trainer.publish(START, None, {})
    async with stage.of(BATCHES[0]) as found:
        await found.ready()
        held = await place.client.who_has(found.futures)
    assert sorted(address for addresses in held.values() for address in addresses) == sorted(await place.addresses("SCORE"))


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_what_is_lost_with_a_worker_is_computed_again_on_another(processes: Place) -> None:
    _, (expected, *_) = _alone(processes.model, 1)
    trainer, stage = await processes.trainer(1), await processes.stage()
    await trainer.publish(START, None, {})
    async with stage.of(BATCHES[0]) as found:
        await found.ready()
        held = await processes.client.who_has(found.futures)
        await processes.kill(next(iter(held.values()))[0])
        metrics = await found.beside(trainer.train(BATCHES[0], False, found.futures))
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-11)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_share_whose_worker_dies_is_taken_by_another_and_one_that_kills_them_is_told(processes: Place, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trainer, stage = await processes.trainer(1), await processes.stage(trap=trap)
    await trainer.publish(START, None, {})
    trap.touch()
    async with stage.of(BATCHES[0]) as found:
        await found.ready()
        assert not trap.exists()
        assert all(f.status == "finished" for f in found.futures)
    await processes.client.run_on_scheduler(_forgive_nothing)
    trap.touch()
    async with stage.of(BATCHES[0]) as found:
        with pytest.raises(LogprobsLost, match=r"died of it, lastly tcp://.*lower logprobs.token_budget"):
            await found.ready()


def _forgive_nothing(dask_scheduler: Scheduler) -> None:
    dask_scheduler.allowed_failures = 0


async def test_a_step_whose_stage_has_no_worker_left_ends_by_an_error_that_says_so(place: Place) -> None:
    trainer = await place.trainer(1)
    stage = LogprobStage(place.client, "NOBODY", "test", START, patience_s=0.1)
    async with stage.of(BATCHES[0]) as found:
        with pytest.raises(LogprobsLost, match=r"no worker has had the resource NOBODY for 0\.1 seconds"):
            await found.beside(trainer.train(BATCHES[0], False, found.futures))


async def test_a_version_that_never_comes_and_a_share_that_is_refused_are_told(place: Place) -> None:
    stage = await place.stage(wait_s=0.2)
    async with stage.of(BATCHES[1]) as found:
        with pytest.raises(LogprobsError, match=r"version 0-0 has not come to .* within 0\.2 seconds"):
            await found.ready()
    (address,) = await place.addresses("TRAIN")
    with pytest.raises(LogprobsError, match="this worker has no policies to ask"):
        await place.client.submit(logprobs_task, LogprobShare(BATCHES[0], 0, 1, START), workers=[address], pure=False)
    (group, *_) = BATCHES[0].groups
    member = group.members[0]
    strange = replace(member, receipt=replace(member.receipt, nonce="another"), score=replace(member.score, nonce="another"))
    async with stage.of(replace(BATCHES[0], groups=(replace(group, members=(strange, *group.members[1:])), *BATCHES[0].groups[1:]))) as found:
        with pytest.raises(BatchError, match="or another execution of it"):
            await found.ready()


async def test_a_batch_with_nothing_to_train_on_asks_nobody(place: Place) -> None:
    members = tuple(replace(m, receipt=replace(m.receipt, sampled=0)) for m in BATCHES[0].groups[0].members)
    stage = LogprobStage(place.client, "NOBODY", "test", START, patience_s=60.0)
    async with stage.of(replace(BATCHES[0], groups=(replace(BATCHES[0].groups[0], members=members),))) as found:
        await found.ready()
        assert found.futures == []
