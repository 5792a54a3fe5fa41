"""How many bytes leave the store when many engines pull a version, on one host and on several; each engine and host a process of its own.

`store_bytes_per_puller` is what was read from the store, commits included, over pullers times the state's bytes: 1 if each
downloads for itself.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from rollart.engines.weight_cache import WeightCache, shared_memory
from storage.version import Version
from storage.weights import WeightStore

ENGINES = (1, 4, 16)
"""Engines on one host."""

HOSTS = (2, 4)
"""Hosts with one engine each."""

PATIENCE_S = 120.0
VERSION = Version(0, 0)


class CountedFiles(LocalFileSystem):
    """Local files as a store elsewhere would have them, `counted:///PATH`; each read's bytes are a line of the file `log`."""

    protocol = "counted"

    def __init__(self, log: str, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)
        self.log = log

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("counted://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """The bytes, counted."""
        data = bytes(super().cat_file(path, start, end, **options))
        line = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(line, b"%d\n" % len(data))
        finally:
            os.close(line)
        return data


fsspec.register_implementation("counted", CountedFiles, clobber=True)


def puller_figures(quick: bool) -> dict[str, float]:
    """`store_bytes_per_puller` by engines on a host and by hosts, of a state of 64 MB, or 512 MB unless `quick`."""
    found = {}
    with published((64 if quick else 512) << 20) as (folder, size):
        for engines in ENGINES:
            found[f"store_bytes_per_puller_{engines}_engines"] = store_bytes(folder, 1, engines) / (engines * size)
        for hosts in HOSTS:
            found[f"store_bytes_per_puller_{hosts}_hosts"] = store_bytes(folder, hosts, 1) / (hosts * size)
        found["store_bytes_per_puller_4_hosts_of_4_engines"] = store_bytes(folder, 4, 4) / (16 * size)
    return found


@contextmanager
def published(size: int) -> Iterator[tuple[Path, int]]:
    """A folder with a store that holds a version of about `size` bytes, and the exact bytes of its tensors."""
    with tempfile.TemporaryDirectory(prefix="rollart-pullers-") as name:
        generator = torch.Generator().manual_seed(0)
        count = 32
        state = {f"layer.{i}": torch.randn(size // 4 // count, generator=generator) for i in range(count)}
        WeightStore(f"{name}/store").publish(state, version=VERSION).result()
        yield Path(name), sum(tensor.nbytes for tensor in state.values())


def store_bytes(folder: Path, hosts: int, engines: int) -> int:
    """Bytes read from the store while `engines` processes on each of `hosts` hosts fetch the version, all at once."""
    log = folder / f"log-{hosts}-{engines}"
    log.unlink(missing_ok=True)
    url, options = f"counted://{folder}/store", {"log": str(log)}
    with tempfile.TemporaryDirectory(prefix="rollart-hosts-", dir=shared_memory()) as memory:
        parents = [f"{memory}/{host}" for host in range(hosts) for _ in range(engines)]
        pipes, processes = zip(*(_start(url, options, parent) for parent in parents), strict=True)
        try:
            _drive(pipes)
        finally:
            for process in processes:
                process.join(PATIENCE_S)
                if process.is_alive():
                    process.kill()
    return sum(map(int, log.read_text().split()))


def _start(url: str, options: Mapping[str, Any], parent: str) -> tuple[Connection, BaseProcess]:
    context = get_context("forkserver")
    context.set_forkserver_preload(["rollart.engines.weight_cache"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_pull, args=(theirs, url, options, parent), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _drive(pipes: Sequence[Connection]) -> None:
    """Tells all the peers once all are there, and has them end once all have fetched."""
    servers = sorted({_received(pipe) for pipe in pipes})
    for told in (servers, None):
        for pipe in pipes:
            pipe.send(told)
        for pipe in pipes:
            _received(pipe)


def _received(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("a puller says nothing")
    return pipe.recv()


def _pull(pipe: Connection, url: str, options: dict[str, Any], parent: str) -> None:
    """An engine's process: says its host's chunk server, is told all of them, fetches, and ends when it is told so."""
    torch.set_num_threads(1)
    cache = WeightCache(WeightStore(url, options), Path(parent), token="benchmark")
    pipe.send(cache.chunk_server())
    peers = pipe.recv()
    begun = time.perf_counter()
    cache.fetch(VERSION, peers)
    pipe.send(time.perf_counter() - begun)
    pipe.recv()
    cache.close()
    pipe.send("closed")


if __name__ == "__main__":
    for name, value in puller_figures(quick=True).items():
        print(f"{name}: {value:.4f}")
