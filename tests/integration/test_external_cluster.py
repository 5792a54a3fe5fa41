"""A cluster that somebody else started: what it lacks is named, and a run leaves it as it found it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest


class Cluster:
    """A scheduler and workers, started with Dask's own commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        self.started: list[subprocess.Popen[bytes]] = []
        self._start("scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(self.file))
        deadline = time.monotonic() + 60
        while not self.file.exists():
            assert time.monotonic() < deadline, "the scheduler did not start"
            time.sleep(0.05)  # another process writes it

    def _start(self, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        self.started.append(
            subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments], env=environment, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )
        )  # fmt: skip

    def worker(self, *resources: str) -> None:
        self._start(
            "worker", "--scheduler-file", str(self.file), "--resources", " ".join(resources), "--nthreads", "64", "--no-dashboard",
            "--memory-limit", "0",
        )  # fmt: skip

    @property
    def address(self) -> str:
        import json

        return str(json.loads(self.file.read_text())["address"])

    def wait_for(self, workers: int) -> None:
        from distributed import Client

        with Client(self.address) as client:
            client.wait_for_workers(workers, timeout=90)

    def processes(self) -> list[str]:
        """The command lines of everything below the commands that were started."""
        tops = [psutil.Process(p.pid) for p in self.started]
        return [" ".join(c.cmdline()) for top in tops for c in top.children(recursive=True)]

    def end(self) -> None:
        for process in reversed(self.started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def test_a_resource_that_no_worker_has_is_named_with_the_command_that_starts_one(place: Any, cluster: Cluster) -> None:
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
def test_a_run_on_a_cluster_of_dask_commands_ends_well_and_leaves_the_cluster_without_engines(place: Any, cluster: Cluster) -> None:
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
