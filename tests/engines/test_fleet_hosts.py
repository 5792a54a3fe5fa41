"""A fleet on two hosts, as two worker processes with shared memory of their own: one copy leaves the store, and a lost host costs no version."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster

from rollart.engines.fleet import EngineFleet
from rollart.engines.host import PLUGIN, EngineHost, EngineSettings
from rollart.engines.weight_cache import SHARED_MEMORY, CacheStats
from storage.version import Version
from storage.weights import WeightStore


def stats(dask_worker) -> CacheStats:
    return dask_worker.plugins[PLUGIN]._cache.stats


@asynccontextmanager
async def two_hosts(tiny, folder: Path) -> AsyncIterator[tuple[Client, EngineFleet, WeightStore]]:
    """A fleet over two workers, each a host, and the store with versions 0-0 and 0-1; at the end nothing of either host is left."""
    weights = WeightStore(str(folder / "weights"))
    for step in (0, 1):
        weights.publish(tiny.model(seed=step).state_dict(), version=Version(0, step)).result()
    tiny.model().config.save_pretrained(folder / "model")
    options = {"nthreads": 2, "resources": {"generate": 1}, "host": "127.0.0.1", "dashboard": False, "local_directory": str(folder / "scratch")}
    workers = {name: {"cls": Nanny, "options": {**options, "env": {SHARED_MEMORY: str(folder / name)}}} for name in ("one", "two")}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard": False}}
    async with (
        SpecCluster(workers=workers, scheduler=scheduler, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2, timeout=60)
        await client.register_plugin(EngineHost(EngineSettings(str(folder / "model"), slots=2, max_length=64), weights.url))
        fleet = EngineFleet(client, frozenset({"generate"}), frozenset({"environment"}))
        yield client, fleet, weights
        await fleet.close()
    for name in ("one", "two"):
        assert os.listdir(folder / name) == []


@pytest.mark.timeout(240)
async def test_two_hosts_take_one_copy_from_the_store(tiny, tmp_path: Path) -> None:
    async with two_hosts(tiny, tmp_path) as (client, fleet, weights):
        size = weights.bytes_to_pull(Version(0, 0))
        await fleet.serve(Version(0, 0))
        assert [entry.version for entry in fleet.table.entries] == [Version(0, 0)] * 2
        found = list((await client.run(stats)).values())
        assert sum(one.store for one in found) == size
        assert [sum(one.peers.values()) for one in found] == [size, size]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_killed_host_costs_no_version(tiny, tmp_path: Path) -> None:
    async with two_hosts(tiny, tmp_path) as (client, fleet, _):
        await fleet.serve(Version(0, 0))
        pids = await client.run(os.getpid)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        await fleet.serve(Version(0, 1))
        assert {entry.version for entry in fleet.table.entries} == {Version(0, 1)}
        await client.wait_for_workers(2, timeout=60)
        await fleet.serve(Version(0, 1))
        assert [entry.version for entry in fleet.table.entries] == [Version(0, 1)] * 2
