"""A cluster that somebody else started: what it lacks is named, and a run leaves it as it found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dask_cluster import DaskCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaskCluster]:
    made = DaskCluster(tmp_path)
    yield made
    made.end()


def test_a_resource_that_no_worker_has_is_named_with_the_command_that_starts_one(place: Any, cluster: DaskCluster) -> None:
    cluster.worker("TRAIN=1")
    cluster.wait_for(1)
    running = place.start("lacking", f"run.scheduler={cluster.address}")
    assert running.wait() == 2, running.heard
    lines = running.heard.splitlines()
    assert lines[0].startswith("rollart: hardware.engine: no worker has the resource GENERATE, which generate needs; start one with ")
    assert 'dask worker SCHEDULER --resources "GENERATE=1"' in lines[0]
    assert [line.removeprefix("rollart: ").partition(":")[0] for line in lines] == ["hardware.engine", "hardware.judge", "hardware.player"]
    assert running.left() == []
    assert not place.run("lacking").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_a_cluster_of_dask_commands_ends_well_and_leaves_the_cluster_without_engines(place: Any, cluster: DaskCluster) -> None:
    cluster.worker("TRAIN=1")
    cluster.worker("GENERATE=1")
    cluster.worker("ENVIRONMENT=48", "REWARD=4")
    cluster.wait_for(3)
    running = place.start("guest", f"run.scheduler={cluster.address}", "train.steps=3")
    running.says("training step 1/")
    assert [c for c in cluster.processes() if "rollart.engines.embedded" in c]
    assert running.wait() == 0, running.heard
    assert running.left() == []
    assert [c for c in cluster.processes() if "rollart" in c] == []
    assert [line["step"] for line in place.metrics("guest", "step")] == [1, 2, 3]
    stopped = place.start("guest-stopped", f"run.scheduler={cluster.address}", "train.steps=100000")
    stopped.says("training step 1/")
    stopped.interrupt()
    assert stopped.wait() == 130, stopped.heard
    assert [c for c in cluster.processes() if "rollart" in c] == []
