"""A generation worker's engine on a real Dask cluster: serves what the store holds, and comes and goes with its worker."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from distributed import Client, LocalCluster, get_worker

from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineDied, EngineUnreachable
from rollart.engines.host import PLUGIN, EngineHost, EngineSettings, serve_task
from rollart.engines.router import EngineEntry
from rollart.types import GenerateRequest, SamplingTransform
from storage.errors import VersionMissing
from storage.version import Version
from storage.weights import WeightStore

GREEDY = SamplingTransform(temperature=0.0)


@pytest.fixture(scope="module")
def store(tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The URL of a store with versions 0-0 and 0-1 of a tiny model, and the model's folder, which has no weights."""
    folder = tmp_path_factory.mktemp("model")
    url = str(tmp_path_factory.mktemp("weights"))
    weights = WeightStore(url)
    for step in (0, 1):
        model = tiny.model(seed=step)
        weights.publish(model.state_dict(), version=Version(0, step)).result()
        model.config.save_pretrained(folder)
    return url, folder


@pytest.fixture(scope="module")
def cluster(store: tuple[str, Path]) -> Iterator[Client]:
    url, folder = store
    with (
        LocalCluster(n_workers=1, threads_per_worker=4, processes=True, resources={"generate": 1}, dashboard_address=None) as running,
        Client(running) as client,
    ):
        client.register_plugin(EngineHost(EngineSettings(str(folder), slots=4, max_length=128), url))
        yield client


def _serve(client: Client, step: int) -> EngineEntry:
    (entry,) = client.run(serve_task, Version(0, step)).values()
    return entry


def _pid(client: Client) -> int:
    (pid,) = client.run(lambda dask_worker: dask_worker.plugins[PLUGIN].pid).values()
    return int(pid)


@pytest.mark.parametrize("step", [0, 1])
async def test_serves_the_version_of_the_store_and_says_so(tiny, cluster: Client, step: int) -> None:
    entry = _serve(cluster, step)
    assert (entry.version, entry.hardware_class, entry.load) == (Version(0, step), "generate", 0)
    prompt = (5, 6, 7, 8)
    async with EngineClient() as client:
        result = await client.generate(entry.url, GenerateRequest("a", prompt, 6, GREEDY))
    assert list(result.ids) == tiny.greedy(tiny.model(seed=step), prompt, 6)
    assert set(result.versions) == {Version(0, step)}


def test_a_version_that_does_not_exist_leaves_the_served_one(cluster: Client) -> None:
    _serve(cluster, 1)
    with pytest.raises(VersionMissing):
        _serve(cluster, 7)
    assert _serve(cluster, 1).version == Version(0, 1)


def test_a_dead_engine_is_reported_and_started_again_at_the_next_serve(cluster: Client) -> None:
    _serve(cluster, 0)
    engine = psutil.Process(_pid(cluster))
    engine.kill()
    psutil.wait_procs([engine], timeout=10)

    async def until_noticed(dask_worker) -> None:
        host = dask_worker.plugins[PLUGIN]
        await asyncio.wait_for(host._process._process.wait(), 10)

    cluster.run(until_noticed)
    with pytest.raises(EngineDied, match="code -9"):
        _pid(cluster)
    assert _serve(cluster, 1).version == Version(0, 1)
    assert _pid(cluster) != engine.pid


def test_the_engine_dies_with_a_killed_worker_and_a_new_one_starts_with_the_next(cluster: Client) -> None:
    _serve(cluster, 0)
    engine = psutil.Process(_pid(cluster))
    (worker,) = cluster.run(os.getpid).values()
    os.kill(worker, signal.SIGKILL)
    gone, alive = psutil.wait_procs([engine], timeout=20)
    assert gone and not alive
    cluster.wait_for_workers(1, timeout=60)
    entry = cluster.submit(_serve_here, resources={"generate": 1}, pure=False).result(timeout=90)
    assert entry.version == Version(0, 1)
    assert _pid(cluster) != engine.pid


async def _serve_here() -> EngineEntry:
    return await serve_task(Version(0, 1), get_worker())


def test_closing_the_cluster_leaves_no_process_and_no_folder(tiny, store: tuple[str, Path], tmp_path: Path) -> None:
    url = str(tmp_path)
    WeightStore(url).publish(tiny.model().state_dict(), version=Version(0, 0)).result()
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=True, resources={"generate": 1}, dashboard_address=None) as running,
        Client(running) as client,
    ):
        client.register_plugin(EngineHost(EngineSettings(str(store[1]), slots=2, max_length=64), url))
        _serve(client, 0)
        engine = psutil.Process(_pid(client))
        (folder,) = client.run(lambda dask_worker: dask_worker.plugins[PLUGIN]._cache.folder).values()
        assert (folder / "v0-0" / "model.safetensors").exists()
    gone, alive = psutil.wait_procs([engine], timeout=20)
    assert gone and not alive
    assert not folder.exists()


def test_a_worker_without_the_resource_starts_no_engine(store: tuple[str, Path]) -> None:
    url, folder = store
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as running,
        Client(running) as client,
    ):
        client.register_plugin(EngineHost(EngineSettings(str(folder)), url))
        with pytest.raises(EngineDied, match="none of the resources generate"):
            _serve(client, 0)


async def test_an_engine_that_does_not_answer_yet_lives_is_no_cause_of_itself() -> None:
    host = EngineHost(EngineSettings("nowhere"), "nowhere")
    host._serving, host._cache, host._client = asyncio.Lock(), object(), EngineClient()  # type: ignore[assignment]
    host._process = SimpleNamespace(alive=True, url="http://127.0.0.1:9")  # type: ignore[assignment]
    with pytest.raises(EngineUnreachable) as refused:
        await host.serve(Version(0, 0))
    await host._client.close()
    cause, seen = refused.value, []
    while cause is not None and cause not in seen:  # as Dask follows it, which would never end on a circle
        seen.append(cause)
        cause = cause.__cause__
    assert cause is None
