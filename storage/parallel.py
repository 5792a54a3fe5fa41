"""Runs a few requests at once; owns the threads, not what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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
