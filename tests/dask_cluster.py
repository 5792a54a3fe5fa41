"""A cluster that somebody else started: a scheduler and workers of Dask's own commands, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil


class DaskCluster:
    """The scheduler runs; workers are added. `folder` takes their files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.scheduler = self._start("scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(self.file))
        deadline = time.monotonic() + 60
        while not self.file.exists():
            assert time.monotonic() < deadline, "the scheduler did not start"
            time.sleep(0.05)  # another process writes it

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "PYTHONPATH": os.getcwd()}
        with (self.folder / f"{arguments[0]}-{len(self.workers)}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments], env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def worker(self, *resources: str, name: str | None = None, nanny: bool = True) -> None:
        """Adds a worker process with these resources (`NAME=UNITS`), which its nanny starts again if it dies."""
        name = name or f"worker-{len(self.workers)}"
        self.workers[name] = self._start(
            "worker", "--scheduler-file", str(self.file), "--resources", " ".join(resources), "--nthreads", "64", "--no-dashboard",
            "--memory-limit", "0", "--name", name, "--nanny" if nanny else "--no-nanny",
        )  # fmt: skip

    @property
    def address(self) -> str:
        return str(json.loads(self.file.read_text())["address"])

    def wait_for(self, workers: int) -> None:
        from distributed import Client

        with Client(self.address) as client:
            client.wait_for_workers(workers, timeout=90)

    def processes(self) -> list[str]:
        """The command lines of everything below the commands that were started."""
        tops = [psutil.Process(p.pid) for p in (self.scheduler, *self.workers.values())]
        return [" ".join(c.cmdline()) for top in tops for c in top.children(recursive=True)]

    def process(self, name: str) -> psutil.Process | None:
        """The process that does the work of worker `name`, below its nanny; None while there is none."""
        for child in psutil.Process(self.workers[name].pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                return child
        return None

    def engine(self, name: str) -> psutil.Process | None:
        """The engine that worker `name` keeps; None while there is none."""
        for child in psutil.Process(self.workers[name].pid).children(recursive=True):
            if "rollart.engines.embedded" in " ".join(child.cmdline()):
                return child
        return None

    def end(self) -> None:
        for process in (*self.workers.values(), self.scheduler):
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, and was waited for
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
