"""A generation worker with a real SGLang server on a real Dask cluster: serves what the store holds, swaps, and takes all processes along."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from rollart.engines.client import EngineClient
from rollart.engines.host import PLUGIN, EngineHost, serve_task
from rollart.engines.response import STREAM_INTERVAL
from rollart.engines.router import EngineEntry
from rollart.engines.sglang.settings import SglangSettings
from rollart.engines.sglang.slices import Shape, rank_of
from rollart.engines.sglang.tensors import described
from rollart.types import GenerateRequest, GenerateResult, SamplingTransform
from storage.version import Version
from storage.weights import WeightStore
from tests.sglang import PYTHON, needs_sglang

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(600), needs_sglang]

LONGEST = 128
GREEDY = SamplingTransform(temperature=0.0)


@pytest.fixture(scope="module")
def cluster(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A worker with a server, and a store with versions 0-0 to 0-2 of a tiny model whose folder has no weights."""
    folder, url = tmp_path_factory.mktemp("model"), str(tmp_path_factory.mktemp("weights"))
    for step in range(3):
        model = tiny.model(seed=step)
        WeightStore(url).publish(model.state_dict(), version=Version(0, step)).result()
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    settings = SglangSettings(str(folder), python=str(PYTHON), slots=4, max_length=LONGEST)
    with (
        LocalCluster(n_workers=1, threads_per_worker=4, processes=True, resources={"generate": 1}, dashboard_address=None) as running,
        Client(running) as client,
    ):
        client.register_plugin(EngineHost(settings, url))
        yield client


def _serve(client: Client, step: int) -> EngineEntry:
    (entry,) = client.run(serve_task, Version(0, step)).values()
    return entry


@pytest.mark.parametrize("step", [0, 1])
async def test_serves_the_version_of_the_store_to_the_last_token_that_the_configuration_allows(tiny: Any, cluster: Client, step: int) -> None:
    entry = _serve(cluster, step)
    assert (entry.version, entry.hardware_class) == (Version(0, step), "generate")
    prompt = tiny.prompt(LONGEST - 6)
    async with EngineClient() as client:
        result = await client.generate(entry.url, GenerateRequest("a", tuple(prompt), 6, GREEDY))
        last = await client.generate(entry.url, GenerateRequest("b", tuple(tiny.prompt(LONGEST - 1)), 1, GREEDY))
    assert list(result.ids) == tiny.greedy(tiny.model(seed=step), prompt, 6)
    assert set(result.versions) == {Version(0, step)} and len(last.ids) == 1


async def test_responses_that_a_swap_meets_go_on_under_the_new_version_whether_they_had_a_slot_or_waited(tiny: Any, cluster: Client) -> None:
    url = _serve(cluster, 1).url
    heard = asyncio.Event()

    def hear(so_far: GenerateResult) -> None:
        if len(so_far.ids) >= STREAM_INTERVAL:
            heard.set()

    prompts = [tuple(tiny.prompt(5, seed=n)) for n in range(6)]  # two more than there are slots
    async with EngineClient() as client:
        requests = [GenerateRequest(f"r{n}", prompt, LONGEST - 5, GREEDY, extra_key="0-1") for n, prompt in enumerate(prompts)]
        asked = [asyncio.create_task(client.generate(url, request, hear)) for request in requests]
        await heard.wait()
        assert (await asyncio.to_thread(_serve, cluster, 2)).version == Version(0, 2)
        results = [await answer for answer in asked]
    swaps = []
    for prompt, result in zip(prompts, results, strict=True):
        swap = result.versions.index(Version(0, 2))
        assert set(result.versions[:swap]) <= {Version(0, 1)} and set(result.versions[swap:]) == {Version(0, 2)}
        assert list(result.ids[:swap]) == tiny.greedy(tiny.model(seed=1), prompt, swap or 1)[:swap]
        assert list(result.ids[swap:]) == tiny.greedy(tiny.model(seed=2), [*prompt, *result.ids[:swap]], len(result.ids) - swap)
        swaps.append(swap)
    assert max(swaps) >= STREAM_INTERVAL and min(swaps) == 0


@pytest.mark.parametrize("parts", [False, True])
async def test_weights_are_taken_as_tensors_too_whole_or_as_a_ranks_part(tiny: Any, cluster: Client, parts: bool) -> None:
    url, model = _serve(cluster, 0).url, tiny.model(seed=3)
    weights = {name: tensor.detach().clone().share_memory_() for name, tensor in model.named_parameters()}
    shape = Shape.of({**model.config.to_dict(), "architectures": [type(model).__name__]})
    ranks = described([rank_of(weights, shape, 0, 1) if parts else weights])
    prompt = tiny.prompt(9)
    async with EngineClient() as client:
        await client.update_by_tensors(url, ranks, "target", "0-7", "retracting", parts)
        result = await client.generate(url, GenerateRequest(f"tensors-{parts}", tuple(prompt), 8, GREEDY))
        assert list(result.ids) == tiny.greedy(model, prompt, 8) and set(result.versions) == {Version(0, 7)}
        # A server without a draft has nobody to give these to, and goes on.
        await client.update_by_tensors(url, described([{}]), "draft", None, "in_place")
        again = await client.generate(url, GenerateRequest(f"after-{parts}", tuple(prompt), 8, GREEDY))
    assert again.ids == result.ids and set(again.versions) == {Version(0, 7)}


def test_all_of_its_processes_die_with_a_killed_worker(cluster: Client) -> None:
    _serve(cluster, 0)
    (worker,) = cluster.run(os.getpid).values()
    (launcher,) = cluster.run(lambda dask_worker: dask_worker.plugins[PLUGIN].pid).values()
    server = psutil.Process(int(launcher)).children(recursive=True)
    assert len(server) >= 3  # itself, its scheduler and its detokenizer
    files = {name for p in server for name in re.findall(r"/dev/shm/sgl\S+", Path(f"/proc/{p.pid}/maps").read_text())}
    for nanny in cluster.cluster.workers.values():
        nanny.close_gracefully()  # with its worker, else the end of the tests waits for another server to come up
    os.kill(worker, signal.SIGKILL)
    gone, alive = psutil.wait_procs([psutil.Process(int(launcher)), *server], timeout=30)
    assert gone and not alive
    assert files and not any(Path(name).exists() for name in files)
