"""Finds what an earlier execution of a Dask task has recorded, so that a task that Dask runs again plays nothing again. Writes nothing.

Dask runs a task again whose result was lost with its worker, with the same key. An execution's nonce begins with a mark of that key, so
that it can be told which dispatch of an attempt it was for: an episode is evaluated again and again, under the same name.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import uuid
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollart.rollout.records import FLUSHED, RecordsDamaged, flushed_at
from rollart.types import Attempt, Episode, Receipt
from storage.objects.info import ObjectInfo
from storage.objects.store import ObjectStore

SKEW_S = 60.0
"""How far the clocks of a run's machines may lie apart: a file that is older than a dispatch by more holds nothing of it."""

TOGETHER_S = 0.05
"""How long one that looks waits for others, who then share a listing."""

KEEP = 512
"""Files whose receipts are remembered, some tens of kilobytes each."""

_MARK = 8

_COLUMNS = [
    "purpose", "task", "episode", "member", "attempt", "nonce", "lineage", "outcome", "first_version", "last_version", "tokens", "sampled",
    "turns", "seconds",
]  # fmt: skip


def own_nonce(key: str) -> str:
    """A name for one execution of the task `key`."""
    return _mark(key) + uuid.uuid4().hex[_MARK:]


class Recorded:
    """The executions recorded in flushed files of the run in `store`. The receipts of the `keep` files seen last, and of all that one that looks
    has to look at, stay in memory; those of the process's own files are told by `note`, and not read."""

    def __init__(self, store: ObjectStore, keep: int = KEEP) -> None:
        self._store, self._keep = store, keep
        self._files: OrderedDict[str, list[Receipt]] = OrderedDict()
        self._by_mark: defaultdict[str, list[Receipt]] = defaultdict(list)
        self._reading = asyncio.Lock()
        self._listing: asyncio.Task[list[ObjectInfo]] | None = None

    def note(self, receipt: Receipt) -> None:
        """This process has recorded an execution; all of a file are told before anybody can look for them."""
        self._files.setdefault(receipt.file, []).append(receipt)
        self._by_mark[receipt.nonce[:_MARK]].append(receipt)
        self._forget(self._keep)

    async def find(self, attempt: Attempt, key: str, sent: float) -> Receipt | None:
        """The execution of task `key`, dispatched at `sent` (unix seconds) to play `attempt`, that was recorded first; None if none was.
        StoreError."""
        young = {info.path: info for info in await self._list_together() if flushed_at(info.path) >= sent - SKEW_S}
        async with self._reading:
            for info in [info for path, info in young.items() if path not in self._files]:
                receipts = self._files[info.path] = await asyncio.to_thread(_receipts, self._store, info)
                for receipt in receipts:
                    self._by_mark[receipt.nonce[:_MARK]].append(receipt)
        for path in young.keys() & self._files.keys():
            self._files.move_to_end(path)
        self._forget(max(self._keep, len(young)))  # with less, each one that looks would read all of them again
        found = [r for r in self._by_mark.get(_mark(key), ()) if r.attempt == attempt and r.file in young]
        return min(found, key=lambda r: (flushed_at(r.file), r.file, r.row), default=None)

    async def _list_together(self) -> list[ObjectInfo]:
        if self._listing is None:
            self._listing = asyncio.create_task(self._list())
        return await asyncio.shield(self._listing)

    async def _list(self) -> list[ObjectInfo]:
        await asyncio.sleep(TOGETHER_S)
        self._listing = None  # whoever comes from here on may look for what is flushed from here on
        return await asyncio.to_thread(self._store.infos, FLUSHED)

    def _forget(self, keep: int) -> None:
        while len(self._files) > keep:
            _, receipts = self._files.popitem(last=False)
            for mark in {r.nonce[:_MARK] for r in receipts}:
                if left := [r for r in self._by_mark.pop(mark) if r.file in self._files]:
                    self._by_mark[mark] = left


def _mark(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:_MARK]


def _receipts(store: ObjectStore, info: ObjectInfo) -> list[Receipt]:
    """The receipts of a file's trajectories, row by row. Of the file only its end and what they are made of is read, not the tokens."""
    try:
        rows = pq.ParquetFile(pa.PythonFile(_Reading(store, info), mode="r"), pre_buffer=True).read(_COLUMNS).to_pylist()
    except pa.ArrowException as error:
        raise RecordsDamaged(f"{store.url}/{info.path} is no whole Parquet file ({error}); remove it to go on without what it held") from error
    return [_receipt(info.path, number, row) for number, row in enumerate(rows)]


def _receipt(file: str, number: int, row: dict[str, Any]) -> Receipt:
    attempt = Attempt(Episode(row["task"], row["episode"], row["purpose"]), row["member"], row["attempt"])
    return Receipt(
        attempt, row["nonce"], row["lineage"], file, number, row["outcome"], row["first_version"], row["last_version"], row["tokens"],
        row["sampled"], row["turns"], json.loads(row["seconds"]),
    )  # fmt: skip


class _Reading(io.RawIOBase):
    """An object as a file to read in."""

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self._store, self._info, self._at = store, info, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._info.bytes}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._info.bytes - self._at)
        buffer = np.empty(left if size < 0 else min(size, left), np.uint8)
        if len(buffer):
            self._store.read_into(self._info.path, buffer, self._at)
        self._at += len(buffer)
        return buffer.tobytes()
