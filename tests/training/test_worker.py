"""The learner as Dask tasks, on a real scheduler and worker, with real stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client, LocalCluster

from rollart.training.errors import BatchError, StateError
from rollart.training.keeping import Keeping
from rollart.training.settings import LearnerSettings, OptimiserSettings
from rollart.training.worker import (
    LearnerPlugin,
    begin_task,
    checkpoint_task,
    collect_task,
    load_checkpoint_task,
    load_weights_task,
    publish_task,
    supervised_receipts_task,
    supervised_task,
    train_task,
)
from rollart.types import Batch, Group, Member, Receipt, Score, Trajectory
from storage.checkpoints import CheckpointStore
from storage.version import Version
from storage.weights import WeightStore

SETTINGS = LearnerSettings(optimiser=OptimiserSettings(lr=0.01))


@dataclass
class Reader:
    """Reads trajectories from a list, by row."""

    trajectories: list[Trajectory]

    def __call__(self, receipts: Sequence[Receipt]) -> list[Trajectory]:
        return [self.trajectories[r.row] for r in receipts]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=1, threads_per_worker=3, processes=False, dashboard_address=":0", resources={"TRAIN": 1}) as cluster,
        Client(cluster) as client,
    ):
        yield client


Call = Callable[..., Any]


@pytest.fixture
def trajectories(make_trajectories) -> list[Trajectory]:
    return make_trajectories((3, 2))


@pytest.fixture
def start(client: Client, llama: Path, tmp_path: Path, trajectories: list[Trajectory]) -> Iterator[Callable[[], Call]]:
    """Makes a fresh learner in the worker, over the same stores, and returns what runs a task there."""

    def call(task: Callable[..., Any], *args: Any) -> Any:
        (address,) = client.scheduler_info()["workers"]
        return client.submit(task, *args, workers=[address], allow_other_workers=False, pure=False).result()

    def make() -> Call:
        if started:
            client.unregister_worker_plugin("learner")
        started.append(True)
        plugin = LearnerPlugin(
            str(llama), SETTINGS, Reader(trajectories), weights_url=str(tmp_path / "weights"), checkpoints_url=str(tmp_path / "checkpoints")
        )
        client.register_plugin(plugin)
        return call

    started: list[bool] = []
    yield make
    client.unregister_worker_plugin("learner")


def _batch(trajectories: list[Trajectory], step: int, lineage: int = 0) -> Batch:
    members: dict[Any, list[Member]] = {}
    for row, t in enumerate(trajectories):
        receipt = Receipt(t.attempt, t.nonce, t.lineage, "file", row, t.outcome, 0, 0, 9, t.sampled, 1)
        score = Score(t.attempt, t.nonce, float((row + step) % 2))
        members.setdefault(t.attempt.episode, []).append(Member(receipt, score))
    return Batch(lineage, step, tuple(Group(e, tuple(m)) for e, m in members.items()))


def test_a_step_trains_on_receipts_and_its_version_is_published(start, trajectories, tmp_path: Path) -> None:
    call = start()
    call(publish_task, Version(0, 0))
    metrics = call(train_task, _batch(trajectories, 0))
    assert (metrics.step, metrics.trajectories, metrics.tokens) == (0, 5, sum(t.sampled for t in trajectories))
    assert call(publish_task, Version(0, 1), Version(0, 0), {"note": "one"}) == Version(0, 1)
    store = WeightStore(str(tmp_path / "weights"))
    before, after = store.pull(Version(0, 0)), store.pull(Version(0, 1))
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert store.commit(Version(0, 1)).metadata == {"note": "one"}


def test_a_version_is_published_right_though_the_next_step_was_trained_meanwhile(start, trajectories, tmp_path: Path) -> None:
    call = start()
    for step in range(3):
        call(train_task, _batch(trajectories, step))
    call(publish_task, Version(0, 2))
    call(publish_task, Version(0, 3))
    with pytest.raises(StateError, match="0-1 is asked for"):
        call(publish_task, Version(0, 1))
    other = start()
    for step in range(2):
        other(train_task, _batch(trajectories, step))
    other(checkpoint_task, Version(0, 2))
    published = WeightStore(str(tmp_path / "weights")).pull(Version(0, 2))
    expected = CheckpointStore(str(tmp_path / "checkpoints")).load().arrays
    assert all(torch.equal(value, expected[f"weights/{name}"]) for name, value in published.items())


def test_a_task_that_dask_runs_again_does_not_train_twice(start, trajectories) -> None:
    call = start()
    first = call(train_task, _batch(trajectories, 0))
    assert call(train_task, _batch(trajectories, 0)) == first
    with pytest.raises(StateError, match="version 0"):
        call(train_task, _batch(trajectories, 0, lineage=1))
    assert call(train_task, _batch(trajectories, 1)).step == 1


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(start, trajectories, tmp_path: Path) -> None:
    call = start()
    for step in range(2):
        call(train_task, _batch(trajectories, step), True)
    call(train_task, _batch(trajectories, 2))
    assert call(checkpoint_task, Version(0, 2), {"ledger": {"next": 7}}) == Version(0, 2)  # the kept state, though a step was taken since
    call(publish_task, Version(0, 3))

    again = start()
    assert again(load_checkpoint_task) == (Version(0, 2), {"ledger": {"next": 7}})
    again(train_task, _batch(trajectories, 2, lineage=1))
    again(publish_task, Version(1, 3))
    store = WeightStore(str(tmp_path / "weights"))
    one, other = store.pull(Version(0, 3)), store.pull(Version(1, 3))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_of_old_versions_those_stay_that_are_asked_for_in_use_or_to_be_gone_on_from(start, trajectories, tmp_path: Path) -> None:
    call = start()
    weights, checkpoints = WeightStore(str(tmp_path / "weights")), CheckpointStore(str(tmp_path / "checkpoints"))
    for step in range(10):
        call(publish_task, Version(0, step))
        if step in {1, 2, 5}:
            call(checkpoint_task, Version(0, step))
        call(train_task, _batch(trajectories, step), True)
    everything = Keeping(checkpoints=0, last=0, every=0, window=0, grace=0.0)
    call(collect_task, everything)
    assert (len(weights.versions()), len(checkpoints.versions())) == (10, 3)
    for _ in range(2):  # what goes in the first loses its data in the second
        call(collect_task, Keeping(checkpoints=2, last=1, every=4, window=1, grace=0.0))
    assert checkpoints.versions() == [Version(0, 2), Version(0, 5)]
    assert [v.step for v in weights.versions()] == [0, 2, 4, 5, 8, 9]
    checked = weights.verify()
    assert checked.sound and not checked.retired and not checked.orphans
    again = start()
    assert again(load_checkpoint_task)[0] == Version(0, 5)
    assert again(load_weights_task) == Version(0, 9)


def test_warm_up_then_training_starts_afresh_and_weights_are_taken_over(start, trajectories, tmp_path: Path) -> None:
    call = start()
    losses = [call(supervised_task, [s for t in trajectories for s in t.segments]).loss for _ in range(3)]
    assert losses[2] < losses[0]
    call(begin_task)
    call(publish_task, Version(0, 0))
    expected = call(train_task, _batch(trajectories, 0))
    again = start()
    assert again(load_weights_task) == Version(0, 0)
    found = again(train_task, _batch(trajectories, 0))
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)


def test_supervised_steps_take_durable_trajectories_by_receipt(start, trajectories) -> None:
    call = start()
    expected = call(supervised_task, [s for t in trajectories for s in t.segments])
    again = start()
    found = again(supervised_receipts_task, [m.receipt for m in _batch(trajectories, 0).members])
    assert (found.loss, found.tokens) == (expected.loss, sum(t.sampled for t in trajectories))


def test_publishing_waits_for_no_step_that_is_under_way(client: Client, start, trajectories, tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()
    call = start()
    call(train_task, _batch(trajectories, 0))
    (plugin,) = [w.plugins["learner"] for w in client.cluster.workers.values()]
    read = plugin.read

    def slow(receipts: Sequence[Receipt]) -> list[Trajectory]:
        entered.set()
        leave.wait(30)
        return read(receipts)

    plugin.read = slow
    step = client.submit(train_task, _batch(trajectories, 1), pure=False)
    assert entered.wait(30)
    assert call(publish_task, Version(0, 1)) == Version(0, 1)
    assert not step.done()
    leave.set()
    assert step.result().step == 1


def test_a_trajectory_of_another_execution_is_refused(start, trajectories) -> None:
    call = start()
    received = [replace(trajectories[0], nonce="other"), *trajectories[1:]]
    with pytest.raises(BatchError, match="another execution"):
        call(train_task, _batch(received, 0))


def test_a_worker_without_a_learner_says_so(client: Client, trajectories) -> None:
    with pytest.raises(StateError, match="no learner"):
        client.submit(train_task, _batch(trajectories, 0), pure=False).result()
