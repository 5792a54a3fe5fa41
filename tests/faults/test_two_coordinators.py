"""A second process that runs the same run: refused while the first is there; once it has taken over, the first comes back and counts for nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rollart import lease
from rollart.journal import Opened
from storage.objects.store import ObjectStore
from tests.dask_cluster import DaskCluster

ENDLESS = ("train.steps=100000", "evaluate.every=0", "evaluate.episodes=4", "run.lease=2")

pytestmark = pytest.mark.timeout(500)


def paused(place: Any, name: str, first: Any) -> int:
    """Stops the process of a run where it is and waits until its lease has ended; the steps that count by then."""
    os.kill(first.process.pid, signal.SIGSTOP)
    store = ObjectStore(str(place.run(name)))
    while (held := lease.read(store)) is None or held.holds(time.time()):
        time.sleep(0.1)  # it has to be silent for as long as its lease
    return int(place.journal(name).steps())


def assert_comes_back_in_vain(name: str, first: Any, second: Any) -> None:
    """Lets the process go on, whose run `second` has taken over."""
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.wait() == 3, first.heard
    (said,) = [line for line in first.heard.splitlines() if line.startswith("rollart: ")]
    assert f"was taken over by process {second.process.pid} on" in said or "of this run is superseded by coordinator" in said
    assert "Traceback" not in first.heard
    assert first.left(20.0) == []
    assert second.wait() == 0, second.heard
    assert second.left() == []


def assert_counts_once(place: Any, name: str, reached: int, steps: int) -> None:
    """Steps from `reached` on are the second coordinator's; nothing counts twice, and nothing of the first's stands after that."""
    journal = place.journal(name)
    opened = [n for n in journal.numbers() if isinstance(journal.read(n), Opened)]
    counted = journal.batches()
    assert opened[0] == 0 and len(opened) == 2
    assert [b.step for b in counted] == list(range(steps))
    assert {(b.coordinator, b.lineage) for b in counted if b.step >= reached} == {(opened[1], 1)}
    nonces = [nonce for batch in counted for _, nonce, fate in batch.fates if fate in ("trained", "no_signal")]
    assert len(set(nonces)) == len(nonces)
    table = place.trajectories(name)
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(["task", "episode", "member"]).any()
    assert sorted(trained["nonce"]) == sorted(nonces)
    lines = place.metrics(name, "step")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [line["version"] for line in lines][reached:] == [f"1-{n + 1}" for n in range(reached, steps)]
    assert [line["state"] for line in place.metrics(name, "end")] == ["done"]
    assert str(place.weights(name).newest()) == f"1-{steps}"


@pytest.mark.slow
def test_a_coordinator_that_comes_back_after_another_has_taken_over_commits_nothing_and_ends(place: Any) -> None:
    first = place.start("paused", *ENDLESS)
    first.says("training step 3/")
    refused = place.start("paused", *ENDLESS, resume=True)
    assert refused.wait() == 2
    (said,) = refused.heard.splitlines()
    assert said.startswith(f"rollart: {place.run('paused')} is run by process {first.process.pid} on ")

    reached = paused(place, "paused", first)
    second = place.start("paused", f"train.steps={reached + 3}", *ENDLESS[1:], resume=True)
    second.says(f"training step {reached + 1}/")
    assert_comes_back_in_vain("paused", first, second)
    assert_counts_once(place, "paused", reached, reached + 3)


@pytest.mark.slow
def test_one_that_comes_back_to_a_scheduler_that_both_use_leaves_the_workers_to_the_other(place: Any, tmp_path: Path) -> None:
    cluster = DaskCluster(tmp_path)
    try:
        for resources in (("TRAIN=1",), ("GENERATE=1",), ("ENVIRONMENT=48", "REWARD=4")):
            cluster.worker(*resources)
        cluster.wait_for(3)
        shared = f"run.scheduler={cluster.address}"
        first = place.start("shared", shared, *ENDLESS)
        first.says("training step 3/")
        reached = paused(place, "shared", first)
        second = place.start("shared", shared, f"train.steps={reached + 30}", *ENDLESS[1:], resume=True)
        second.says(f"training step {reached + 1}/")
        assert_comes_back_in_vain("shared", first, second)
        assert_counts_once(place, "shared", reached, reached + 30)
        assert [c for c in cluster.processes() if "rollart" in c] == []
    finally:
        cluster.end()
