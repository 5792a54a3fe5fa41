"""What processes on a host do in the tests of `WeightCache`; a module of its own, so that they import nothing else."""

from __future__ import annotations

import signal
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from safetensors.torch import load_file

from rollart.engines.weight_cache import WeightCache
from storage.version import Version
from storage.weights import WeightStore


def context() -> ForkServerContext:
    """Processes that are forked off one which has imported torch and opened nothing."""
    found = get_context("forkserver")
    found.set_forkserver_preload(["rollart.engines.weight_cache"])
    return found


def fetching(url: str, parent: str, version: Version, gate: Barrier, results: Queue) -> None:
    """One engine's process on the host `parent`: fetches when all are there, says what it read from the store and the first value of `a`."""
    cache = WeightCache(WeightStore(url), Path(parent), token="t")
    gate.wait(90)
    folder = cache.fetch(version)
    results.put((cache.stats.store, float(load_file(folder / "model.safetensors")["a"][0, 0])))
    gate.wait(90)
    cache.close()


def serving(url: str, parent: str, results: Queue) -> None:
    """Says the URL of the host's chunk server, and waits to be killed."""
    results.put(WeightCache(WeightStore(url), Path(parent), token="t").chunk_server())
    signal.pause()
