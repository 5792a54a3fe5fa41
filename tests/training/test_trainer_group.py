"""Training over two worker processes, as a flow drives it: through the trainer's handle, on a real scheduler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from distributed import Client, LocalCluster

from rollart.cluster import workers_of
from rollart.training.batch_share import train_share
from rollart.training.errors import BatchError, TrainerLost
from rollart.training.learner import Learner
from rollart.training.ranks import ALONE
from rollart.training.settings import LearnerSettings, ModelSettings, OptimiserSettings
from rollart.training.trainer_group import TrainerGroup
from rollart.training.worker import LearnerPlugin
from rollart.types import Receipt, Trajectory, Version
from storage.weights import WeightStore
from tests.training.conftest import make_trajectories_of
from tests.training.test_ranks import batch_of

SETTINGS = LearnerSettings(model=ModelSettings(dtype="float64"), optimiser=OptimiserSettings(lr=0.01))
TOLD_S = 60.0
"""Well under the ranks' own patience, 300 s."""


@dataclass
class Reader:
    """Reads trajectories from a list, by row; one of row `missing` isn't there."""

    trajectories: list[Trajectory]
    missing: int | None = None

    def __call__(self, receipts: Sequence[Receipt]) -> list[Trajectory]:
        if any(r.row == self.missing for r in receipts):
            raise BatchError(f"row {self.missing} is missing")
        return [self.trajectories[r.row] for r in receipts]


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    async with (
        LocalCluster(n_workers=2, threads_per_worker=4, dashboard_address=None, resources={"TRAIN": 1}, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        yield client


async def start(client: Client, folder: Path, settings: LearnerSettings, reader: Reader, place: Path) -> TrainerGroup:
    plugin = LearnerPlugin(str(folder), settings, reader, weights_url=str(place / "weights"), checkpoints_url=str(place / "checkpoints"))
    await client.register_plugin(plugin)
    group = TrainerGroup(client, [w.address for w in await workers_of(client)], "TRAIN", f"test-{id(reader)}", settings)
    await group.open()
    return group


async def test_two_workers_train_as_one_and_an_error_of_one_of_them_is_told_at_once(client: Client, gpt2: Path, tmp_path: Path) -> None:
    trajectories = make_trajectories_of((3, 2))
    batches = [batch_of(trajectories, step, range(5)) for step in range(2)]
    learner = Learner(gpt2, SETTINGS)
    expected = learner.train_step(train_share(batches[0], SETTINGS, Reader(trajectories), ALONE))

    group = await start(client, gpt2, SETTINGS, Reader(trajectories), tmp_path)
    found = await group.train(batches[0], keep_state=True)
    assert (found.loss, found.grad_norm) == (pytest.approx(expected.loss, rel=1e-10), pytest.approx(expected.grad_norm, rel=1e-10))
    assert (found.tokens, found.trajectories) == (expected.tokens, 5)
    assert await group.publish(Version(0, 1), None, {"note": "one"}) == Version(0, 1)
    published = WeightStore(str(tmp_path / "weights")).pull(Version(0, 1))
    assert all(torch.allclose(value, published[name], atol=1e-9) for name, value in learner.weights().items())
    assert await group.checkpoint(Version(0, 1), {"ledger": {"next": 7}}) == Version(0, 1)

    await client.unregister_worker_plugin("learner")
    again = await start(client, gpt2, SETTINGS, Reader(trajectories, missing=4), tmp_path)
    resumed = await again.resume()
    assert (resumed.version, resumed.documents) == (Version(0, 1), {"ledger": {"next": 7}})
    begun = time.monotonic()
    with pytest.raises(BatchError, match="row 4 is missing"):
        await again.train(batches[1], keep_state=False)
    assert time.monotonic() - begun < TOLD_S


@pytest.mark.slow
async def test_the_loss_of_a_rank_that_has_a_part_of_the_model_is_told_whatever_finds_it_out(client: Client, gpt2: Path, tmp_path: Path) -> None:
    trajectories = make_trajectories_of((3, 2))
    settings = SETTINGS.model_copy(update={"model": ModelSettings(dtype="float64", shard=True)})
    group = await start(client, gpt2, settings, Reader(trajectories), tmp_path)
    await group.train(batch_of(trajectories, 0, range(5)), keep_state=True)
    addresses = [w.address for w in await workers_of(client)]
    pids = await client.run(os.getpid, workers=addresses[1:])
    os.kill(pids[addresses[1]], signal.SIGKILL)
    for work in (
        group.publish(Version(0, 1), None, {}),
        group.checkpoint(Version(0, 1), {}),
        group.train(batch_of(trajectories, 1, range(5)), keep_state=False),
    ):
        with pytest.raises(TrainerLost, match=f"{addresses[1]}.* go on from there with --resume"):
            await work
    assert WeightStore(str(tmp_path / "weights")).versions() == []
