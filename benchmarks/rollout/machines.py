"""What the bed runs on: a scheduler, worker processes, and the scripted engine in a process of its own. All end with their contexts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster
from distributed.deploy.subprocess import SubprocessScheduler

from rollart.cluster import LOOKS, WORKER_ENVIRONMENT

PLAY, JUDGE = "PLAY", "JUDGE"
"""The resources of the workers that play, and of the one that scores."""

JUDGES = 4

DASK = {
    "distributed.nanny.pre-spawn-environ": WORKER_ENVIRONMENT,
    "distributed.worker.daemon": False,
    "distributed.admin.log-format": "%(message)s",
    **LOOKS,
}
"""As for a run's own local cluster."""


@contextlib.asynccontextmanager
async def cluster(slots: int, workers: int = 2, own_scheduler: bool = False) -> AsyncIterator[Client]:
    """A scheduler in this process or in one of its own, `workers` processes that share the `slots` for environments, and one that scores."""
    dask.config.set(DASK)
    os.environ["DASK_INTERNAL_INHERIT_CONFIG"] = dask.config.serialize(dask.config.global_config)  # how Dask hands it to a process of its own
    with tempfile.TemporaryDirectory(prefix="rollart-bed-", ignore_cleanup_errors=True) as scratch:
        shares = [slots // workers + (i < slots % workers) for i in range(workers)]
        wanted = [*((PLAY, share) for share in shares), (JUDGE, JUDGES)]
        specs = {f"{name}-{i}": {"cls": Nanny, "options": _options(name, share, scratch)} for i, (name, share) in enumerate(wanted)}
        options = {"dashboard_address": "127.0.0.1:0", "host": "127.0.0.1", "port": 0}
        scheduler: dict[str, Any] = {"cls": Scheduler, "options": options}
        if own_scheduler:
            options["scheduler_file"] = f"{scratch}/scheduler.json"
            scheduler = {"cls": SubprocessScheduler, "options": {"scheduler_kwargs": options, "timeout": 120}}
        async with (
            SpecCluster(workers=specs, scheduler=scheduler, asynchronous=True, silence_logs=logging.ERROR) as started,
            Client(started, asynchronous=True) as client,
        ):
            await client.wait_for_workers(len(wanted))
            yield client


def _options(resource: str, share: int, scratch: str) -> dict[str, Any]:
    return {
        "nthreads": share + 4, "resources": {resource: share}, "memory_limit": 0, "local_directory": scratch, "host": "127.0.0.1",
        "dashboard_address": None, "dashboard": False, "silence_logs": logging.ERROR,
    }  # fmt: skip


@contextlib.contextmanager
def engine(settings: dict[str, Any]) -> Iterator[str]:
    """The URL of a `ScriptedEngine` with these settings."""
    command = [sys.executable, "-m", "benchmarks.rollout.engine", json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            port = process.stdout.readline().strip() if process.stdout is not None else ""
            if not port:
                raise RuntimeError("the scripted engine did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
