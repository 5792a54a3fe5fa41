"""Hardware classes on Dask: threads that share the cores out, and a cluster that lacks something is told before anything runs."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client, Scheduler, Worker

from rollart import cluster
from rollart.cluster import (
    LOOKS,
    ClusterUnreachable,
    ClusterWorker,
    MissingResource,
    WorkerLeft,
    check_cluster,
    check_port,
    local_cluster,
    missing_resources,
    planned_workers,
    run_on,
)
from rollart.config import Config, parse

QUICKSTART = (Path(__file__).parent.parent / "flows" / "configs" / "quickstart.yaml").read_text()

HARDWARE = """
hardware:
  trainer: {resource: TRAIN, slots: 1}
  engine: {resource: GENERATE, slots: 2, workers: 3}
  player: {resource: PLAY, slots: 48, workers: 2}
  spare: {resource: SPARE, slots: 1}
"""


def configured(*overrides: str) -> Config:
    """Three classes in use, of which `player` serves two stages, and one that nothing needs."""
    stages = ("stages.train=trainer", "stages.generate=engine", "stages.environment=player", "stages.reward=player")
    return parse(QUICKSTART.replace(_section("hardware"), HARDWARE), [*stages, *overrides])


def _section(name: str) -> str:
    """The text of a top-level section of the quick start's configuration."""
    lines = QUICKSTART.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{name}:"))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith((" ", "#", "\n")))
    return "".join(lines[start:end])


def workers(**without: bool) -> list[ClusterWorker]:
    return [w for w in planned_workers(configured()) if not any(w.name.startswith(name) for name in without)]


# ---- threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 1), (8, 2), (64, 16)])
def test_cores_are_shared_out_among_the_processes_that_compute_with_torch(cores: int, threads: int) -> None:
    assert cluster.torch_threads(configured(), cores) == threads  # one trainer and three engines


def test_a_task_with_an_engine_class_of_its_own_counts_as_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("tasks.0.classes={generate: spare}")
    assert cluster.torch_threads(config, 10) == 2
    monkeypatch.setattr(cluster, "CPU_COUNT", 20)
    assert cluster.torch_threads(config) == 4


# ---- what is missing


def test_the_local_cluster_gets_the_workers_of_the_classes_that_are_used() -> None:
    assert [(w.name, dict(w.resources)) for w in planned_workers(configured())] == [
        ("trainer-0", {"TRAIN": 1}),
        *((f"engine-{i}", {"GENERATE": 2}) for i in range(3)),
        *((f"player-{i}", {"PLAY": 48}) for i in range(2)),
    ]
    assert missing_resources(configured(), planned_workers(configured())) == []


def test_each_resource_that_no_worker_has_is_named_with_who_needs_it_and_what_to_start() -> None:
    assert missing_resources(configured(), workers(player=False, trainer=False)) == [
        "hardware.player: no worker has the resource PLAY, which environment, reward needs; "
        'start one with `dask worker SCHEDULER --resources "PLAY=48"`',
        'hardware.trainer: no worker has the resource TRAIN, which train needs; start one with `dask worker SCHEDULER --resources "TRAIN=1"`',
    ]


def test_a_class_that_one_task_alone_needs_is_named_with_that_task() -> None:
    config = configured("tasks.0.classes={generate: spare}")
    (problem,) = missing_resources(config, workers())
    assert problem.startswith(f"hardware.spare: no worker has the resource SPARE, which {config.tasks[0].name}.generate needs;")


def test_the_stage_of_log_probabilities_has_workers_of_its_own_once_a_step_needs_it() -> None:
    idle, needed = (configured("stages.logprobs=spare", f"training.loss.kl={kl}", "training.batch.minibatches=1") for kl in (0, 0.1))
    assert planned_workers(idle) == planned_workers(configured())
    assert missing_resources(idle, workers()) == []
    assert [w.name for w in planned_workers(needed)][-1] == "spare-0"
    (problem,) = missing_resources(needed, workers())
    assert problem.startswith("hardware.spare: no worker has the resource SPARE, which logprobs needs; start one with")
    assert cluster.torch_threads(needed, 10) == 2  # five processes compute with torch


def test_less_than_one_unit_of_a_resource_is_not_enough() -> None:
    short = [*workers(trainer=False), ClusterWorker("tcp://x", "half", {"TRAIN": 0.5})]
    assert [p.partition(":")[0] for p in missing_resources(configured(), short)] == ["hardware.trainer"]


async def test_a_real_cluster_that_lacks_a_class_is_refused_and_passes_once_it_has_it() -> None:
    async with (
        Scheduler(protocol="inproc", dashboard=False) as scheduler,
        Worker(scheduler.address, name="a", resources={"TRAIN": 1, "GENERATE": 2}, dashboard=False),
        Client(scheduler.address, asynchronous=True) as client,
    ):
        with pytest.raises(MissingResource, match=r"hardware.player: no worker has the resource PLAY"):
            await check_cluster(client, configured())
        async with Worker(scheduler.address, name="b", resources={"PLAY": 48}, dashboard=False) as late:
            found = await check_cluster(client, configured())
            assert [(w.name, dict(w.resources)) for w in found] == [("a", {"TRAIN": 1, "GENERATE": 2}), ("b", {"PLAY": 48})]
            assert found[1].address == late.address


async def test_workers_of_the_local_cluster_look_at_themselves_as_rarely_as_it_says(tmp_path: Path) -> None:
    stages = ("train", "generate", "environment", "reward")
    one = configured("run.dashboard_port=0", *(f"stages.{stage}=trainer" for stage in stages))
    async with local_cluster(one, str(tmp_path)) as running, Client(running, asynchronous=True) as client:
        said = await client.run(lambda names: {name: dask.config.get(name) for name in names}, list(LOOKS))
        profiling = await client.run(lambda dask_worker: sorted(c for c in dask_worker.periodic_callbacks if "profile" in c))
    assert list(said.values()) == [LOOKS]
    assert list(profiling.values()) == [[]]


# ---- addresses and ports


@pytest.fixture
def port() -> Iterator[int]:
    """A port that something listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_named_with_what_to_do(port: int) -> None:
    with pytest.raises(ClusterUnreachable, match=rf"run.dashboard_port: port {port} is in use .*--set run.dashboard_port=0"):
        check_port(port)
    with pytest.raises(ClusterUnreachable):
        cluster.look(configured(f"run.dashboard_port={port}"))


def test_any_free_port_will_do(port: int) -> None:
    check_port(0)
    assert cluster.look(configured("run.dashboard_port=0")) == (planned_workers(configured()), [])


async def test_an_address_that_no_scheduler_can_have_is_named() -> None:
    with pytest.raises(ClusterUnreachable, match=r"run.scheduler: no Dask scheduler answers at carrier-pigeon://roof:1 .*correct the address"):
        await cluster.connect("carrier-pigeon://roof:1")


@pytest.mark.parametrize("address", ["tls://127.0.0.1:1", "ucx://127.0.0.1:1"])
async def test_an_address_of_a_kind_that_dask_is_not_set_up_for_is_named(address: str) -> None:
    with pytest.raises(ClusterUnreachable, match=f"run.scheduler: no Dask scheduler answers at {address} "):
        await cluster.connect(address)


async def where(dask_worker: Worker) -> str:
    return dask_worker.address


async def test_a_call_to_workers_ends_with_their_answers_or_as_soon_as_one_of_them_is_gone() -> None:
    async with (
        Scheduler(protocol="tcp://", host="127.0.0.1", dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=1, dashboard=False) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        there = worker.address
        assert await run_on(client, where, workers=[there]) == {there: there}
        with (
            dask.config.set({"distributed.comm.timeouts.connect": "60s"}),
            pytest.raises(WorkerLeft, match=r"tcp://127.0.0.1:9 has left the cluster"),
        ):
            await asyncio.wait_for(run_on(client, where, workers=[there, "tcp://127.0.0.1:9"]), 30)
