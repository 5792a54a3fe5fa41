"""A scheduler that is killed and started again with its workers: the run on it ends in one line, and the same command goes on with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.dask_cluster import DaskCluster

CLASSES = (("TRAIN=1",), ("GENERATE=1",), ("ENVIRONMENT=48", "REWARD=4"))
ENDLESS = ("train.steps=100000", "evaluate.every=0", "evaluate.episodes=4")

pytestmark = pytest.mark.timeout(500)


def started(folder: Path) -> DaskCluster:
    folder.mkdir()
    cluster = DaskCluster(folder)
    for resources in CLASSES:
        cluster.worker(*resources)
    cluster.wait_for(len(CLASSES))
    return cluster


@pytest.mark.slow
def test_a_run_whose_scheduler_is_restarted_ends_in_one_line_and_goes_on_with_resume(place: Any, tmp_path: Path) -> None:
    clusters = [started(tmp_path / "first")]
    try:
        running = place.start("restarted", f"run.scheduler={clusters[0].address}", *ENDLESS)
        running.says("training step 3/")
        os.killpg(clusters[0].scheduler.pid, signal.SIGKILL)
        assert running.wait() == 3, running.heard
        assert running.left(20.0) == []
        (said,) = [line for line in running.heard.splitlines() if line.startswith("rollart: ")]
        assert said == f"rollart: run.scheduler: {clusters[0].address} is gone; start it and its workers again, and go on with --resume"
        assert "Traceback" not in running.heard
        for worker in clusters[0].workers.values():
            worker.wait(60)  # as Dask's own commands do once their scheduler is gone

        clusters.append(started(tmp_path / "second"))
        steps = place.journal("restarted").steps() + 2
        resumed = place.start("restarted", f"run.scheduler={clusters[1].address}", f"train.steps={steps}", *ENDLESS[1:], resume=True)
        assert resumed.wait() == 0, resumed.heard
        assert resumed.left() == []
        assert [c for c in clusters[1].processes() if "rollart" in c] == []
    finally:
        for cluster in clusters:
            cluster.end()
    counted = place.journal("restarted").batches()
    assert [b.step for b in counted] == list(range(steps))
    table = place.trajectories("restarted")
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(["task", "episode", "member"]).any()
    nonces = [nonce for batch in counted for _, nonce, fate in batch.fates if fate in ("trained", "no_signal")]
    assert sorted(trained["nonce"]) == sorted(nonces)
