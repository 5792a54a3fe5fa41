"""Reads trajectories by receipt in another process; travels by pickle and keeps what it read last, since steps share files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rollart.rollout.records import RecordMissing, RecordsDamaged, decode
from rollart.types import Receipt, Trajectory
from storage.objects.store import ObjectStore


class StoredTrajectories:
    """The trajectories of the run at `run_url`, by receipt; the `keep` files read last stay in memory."""

    def __init__(self, run_url: str, storage_options: Mapping[str, Any] | None = None, keep: int = 64) -> None:
        self._store, self._keep = ObjectStore(run_url, storage_options), keep
        self._files: OrderedDict[str, list[Trajectory]] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple[ObjectStore, int]:
        return self._store, self._keep

    def __setstate__(self, state: tuple[ObjectStore, int]) -> None:
        self._store, self._keep = state
        self._files = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, receipts: Sequence[Receipt]) -> list[Trajectory]:
        """The trajectories in the receipts' order; RecordMissing if one is not where its receipt says."""
        return [self.read(r) for r in receipts]

    def read(self, receipt: Receipt) -> Trajectory:
        """One trajectory; RecordMissing if its row holds another execution or none, RecordsDamaged if its file is no whole one."""
        rows = self._file(receipt.file)
        if receipt.row >= len(rows) or rows[receipt.row].nonce != receipt.nonce:
            raise RecordMissing(f"row {receipt.row} of {receipt.file} is not the execution that the receipt of {receipt.attempt} names")
        return rows[receipt.row]

    def _file(self, name: str) -> list[Trajectory]:
        with self._lock:  # held while reading too: the threads that wait are those that want the same file
            rows = self._files.pop(name, None)
            if rows is None:
                data = self._store.read(name)
                try:
                    rows = decode(data)
                except (pa.ArrowException, OSError) as error:
                    raise RecordsDamaged(f"{self._store.url}/{name} is no whole Parquet file ({error}); what it held is lost") from error
            self._files[name] = rows
            while len(self._files) > self._keep:
                self._files.popitem(last=False)
            return rows
