"""Runs a few requests at once; owns the threads, not what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from storage.objects.store import ObjectStore

_IN_FLIGHT_BYTES = 72 << 20
"""What the clients of remote stores may hold of values on their way."""

_FILES_READ = 2
"""Reading a file that is in memory is copying it: two share that with summing up, more only wait for each other."""

_COPIES = 2
"""Clients join what they get or send, so for a moment they hold it twice."""

T = TypeVar("T")
R = TypeVar("R")


def in_flight(store: ObjectStore, chunk_bytes: int, *, writing: bool = False) -> int:
    """How many chunks are best read or written at once: as many as pay off on `store`, but bounded in memory. Files take none."""
    if "://" not in store.url:
        return store.parallel if writing else min(store.parallel, _FILES_READ)
    return max(1, min(store.parallel, _IN_FLIGHT_BYTES // (_COPIES * max(chunk_bytes, 1))))


def side_by_side(work: Callable[[T], R], jobs: Sequence[T], parallel: int) -> list[R]:
    """`work` on each job, up to `parallel` at once; the results in order, or the first error once those that run have ended."""
    if parallel == 1 or len(jobs) < 2:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(min(parallel, len(jobs)), thread_name_prefix="store") as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
