"""Hardware classes and Dask: the local cluster, and the check that a cluster has what a run needs. Runs nothing of a flow."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import dask
from dask.system import CPU_COUNT
from distributed import Client, Nanny, Scheduler, SpecCluster

from rollart.config import Config, ConfigError, HardwareClass
from rollart.control.affinity import Stage

TORCH_STAGES: tuple[Stage, ...] = ("train", "logprobs", "generate")
"""The stages whose processes compute with torch, among which the cores are shared out."""


WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    # Dask has the allocator give memory back after every free, so that each large tensor costs its page faults again: a third of a training step.
    # One arena, since a thread's own holds 64 MB at most and goes to the system for the rest each time.
    "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "1073741824", "MALLOC_MMAP_THRESHOLD_": "1073741824",
}  # fmt: skip
"""What a local worker process starts with, before its interpreter does; torch sets its own number of threads where it computes."""

LOOKS = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "200ms",
    "distributed.admin.system-monitor.interval": "2s",
}
"""How often each process looks at its own event loop and load. As often as Dask does it by itself, the five processes of a run would keep a
sixth of a core busy with that alone. At its stacks none looks: in Python 3.11 a garbage collection inside `sys._current_frames` while another
thread starts one locks the process up for good (python/cpython#106883)."""


class CappedNanny(Nanny):
    """Starts processes whose memory is limited: they give back to the system what they have freed, as soon as Dask's own defaults say."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pre_spawn_env |= {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "131072"}


LOOK_S = 1.0
"""Between two looks at whether workers that have not answered are still there."""


UNREACHABLE = (OSError, ValueError, TypeError, RuntimeError, ImportError)
"""What Dask raises for an address of a kind that it isn't set up for (tls without certificates, ucx), beside what it raises where nothing answers."""


class MissingResource(ConfigError):
    """A hardware class is declared and needed, but no worker of the cluster has its resource."""


class WorkerLeft(OSError):
    """A worker that was called is gone."""


class ClusterUnreachable(ConfigError):
    """The scheduler or its port can't be had."""


@dataclass(frozen=True, slots=True)
class ClusterWorker:
    """A worker as the scheduler sees it."""

    address: str
    name: str
    resources: Mapping[str, float]


def torch_threads(config: Config, cores: int | None = None) -> int:
    """Threads of each torch process: `cores` (default: those that this process may use, by affinity and by a container's limit) shared
    out evenly, at least 1.

    Two torch processes that together want more threads than there are cores slow each other down by a factor of 10 to 40.
    """
    classes = set().union(*(config.affinity.serving(stage, [t.name for t in config.tasks]) for stage in TORCH_STAGES))
    processes = sum(config.hardware[c].workers for c in classes)
    return max(1, (cores or CPU_COUNT) // max(1, processes))


@contextlib.contextmanager
def interrupts_here() -> Iterator[None]:
    """Inside, Ctrl-C, which a terminal sends to every process of its group, reaches this process alone and none that is started.

    Children inherit that this thread blocks the signal, also while they still import; a thread that started before takes it here.
    """
    resource_tracker.ensure_running()  # starting it later, with the first child, would unblock the signal
    over = threading.Event()
    threading.Thread(target=over.wait, name="takes-interrupts", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


def local_cluster(config: Config, scratch: str) -> SpecCluster:
    """A cluster on this machine: `workers` processes a hardware class, each with that class's resource and nothing else.

    One class a process, since Dask looks only at the first of the tasks that wait for a resource. `scratch`: folder for
    the workers' files. Not started yet: await it, or use it as an async context manager.
    """
    check_port(config.run.dashboard_port)
    dask.config.set(
        {
            "distributed.nanny.pre-spawn-environ": WORKER_ENVIRONMENT,
            "distributed.worker.daemon": False,
            "distributed.comm.timeouts.connect": "60s",
            "distributed.admin.log-format": "%(message)s",
            **LOOKS,
        }
    )
    workers = {
        name: {"cls": Nanny if hardware.memory is None else CappedNanny, "options": _worker_options(hardware, scratch)}
        for name, hardware in _processes(config)
    }
    scheduler = {
        "cls": Scheduler,
        "options": {"dashboard_address": f"127.0.0.1:{config.run.dashboard_port}", "host": "127.0.0.1", "port": 0},
    }
    return SpecCluster(workers=workers, scheduler=scheduler, asynchronous=True, silence_logs=False)


def _processes(config: Config) -> list[tuple[str, HardwareClass]]:
    """Name and class of each worker process of a local cluster; a class that nothing is mapped to has none."""
    used = config.affinity.used()
    return [(f"{name}-{i}", h) for name, h in config.hardware.items() if name in used for i in range(h.workers)]


def _worker_options(hardware: HardwareClass, scratch: str) -> dict[str, Any]:
    # A coroutine takes one of a worker's threads to Dask, though it needs none: as many as the slots, and a few for what has no resource.
    return {
        "nthreads": hardware.slots + 4,
        "resources": {hardware.resource: hardware.slots},
        "memory_limit": int(hardware.memory or 0),
        "local_directory": scratch,
        "host": "127.0.0.1",
        "dashboard_address": None,
        "dashboard": False,
    }


def check_port(port: int) -> None:
    """ClusterUnreachable if the dashboard's port is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ClusterUnreachable(
                f"run.dashboard_port: port {port} is in use ({error.strerror}); choose another with --set run.dashboard_port=0 (any free one)"
            ) from error


async def connect(address: str) -> Client:
    """A client of a running scheduler; ClusterUnreachable if none answers there."""
    try:
        return await Client(address, asynchronous=True, timeout=10)
    except UNREACHABLE as error:
        raise _no_scheduler(address, error) from error


def _no_scheduler(address: str, error: Exception) -> ClusterUnreachable:
    return ClusterUnreachable(f"run.scheduler: no Dask scheduler answers at {address} ({error}); start one or correct the address")


async def workers_of(client: Client) -> list[ClusterWorker]:
    """The workers that the scheduler has now, by name."""
    identity = await client.scheduler.identity()
    found = [ClusterWorker(address, str(w["name"]), w["resources"]) for address, w in identity["workers"].items()]
    return sorted(found, key=lambda w: w.name)


async def run_on(client: Client, function: Callable[..., Any], *arguments: Any, workers: Collection[str], **options: Any) -> Any:
    """`Client.run` on these workers; WorkerLeft as soon as one of them has left the cluster, which Dask would go on trying to reach."""
    call = asyncio.ensure_future(client.run(function, *arguments, workers=list(workers), **options))
    try:
        while not (await asyncio.wait((call,), timeout=LOOK_S))[0]:
            if gone := sorted(set(workers) - {w.address for w in await workers_of(client)}):
                raise WorkerLeft(f"worker {', '.join(gone)} has left the cluster before it answered")
        return call.result()
    finally:
        call.cancel()


def missing_resources(config: Config, workers: list[ClusterWorker]) -> list[str]:
    """One line for each hardware class that is needed and that no worker has, or too few where each is a rank, saying what to start."""
    problems = []
    ranks = config.hardware[config.stages["train"]]
    found = sum(w.resources.get(ranks.resource, 0) >= 1 for w in workers)
    if 0 < found < ranks.workers:
        problems.append(
            f"hardware.{config.stages['train']}.workers: training wants {ranks.workers} workers with the resource {ranks.resource}, one a rank, "
            f"and the cluster has {found}; start more, or set it to {found}"
        )
    for name in sorted(config.affinity.used()):
        resource = config.hardware[name].resource
        if not any(w.resources.get(resource, 0) >= 1 for w in workers):
            problems.append(
                f"hardware.{name}: no worker has the resource {resource}, which {', '.join(config.affinity.purposes(name))} needs; "
                f'start one with `dask worker SCHEDULER --resources "{resource}={config.hardware[name].slots}"`'
            )
    return problems


async def check_cluster(client: Client, config: Config) -> list[ClusterWorker]:
    """The workers, once every needed resource is there; MissingResource names those that are not. A task for a resource
    that no worker has would wait for ever without a word."""
    workers = await workers_of(client)
    problems = missing_resources(config, workers)
    if problems:
        raise MissingResource("\n".join(problems))
    return workers


def planned_workers(config: Config) -> list[ClusterWorker]:
    """The workers that `local_cluster` would start."""
    return [ClusterWorker("local", name, {hardware.resource: hardware.slots}) for name, hardware in _processes(config)]


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for workers' files that goes when the run does."""
    return tempfile.TemporaryDirectory(prefix="rollart-", ignore_cleanup_errors=True)


def look(config: Config) -> tuple[list[ClusterWorker], list[str]]:
    """The workers that a run would have, and what stands in its way, without starting anything."""
    if config.run.scheduler is None:
        check_port(config.run.dashboard_port)
        return planned_workers(config), []
    try:
        client = Client(config.run.scheduler, timeout=3)
    except UNREACHABLE as error:
        raise _no_scheduler(config.run.scheduler, error) from error
    with client:
        identity = client.scheduler_info(n_workers=-1)
        workers = [ClusterWorker(a, str(w["name"]), w["resources"]) for a, w in identity["workers"].items()]
    return workers, missing_resources(config, workers)
