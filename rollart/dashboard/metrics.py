"""Writes and reads a run's metrics: `metrics/metrics.jsonl`, one JSON object a line, and TensorBoard events beside it.

On a local file system lines are appended. Object stores cannot append, so there the lines go to pieces, `metrics.jsonl`,
`metrics-00001.jsonl` and so on: the last piece is rewritten whole with each line and closed when it reaches `PIECE_BYTES`, which
bounds what one line costs to write. Either way a line is in the store when `write` returns. Refuses to know what a line means,
but for `step`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollart.dashboard.events import EventLog
from storage.errors import StoreError
from storage.objects.store import ObjectStore

__all__ = ["MetricsError", "MetricsWriter", "PIECE_BYTES", "read_metrics"]

FOLDER = "metrics"

PIECE_BYTES = 128 * 1024
"""An object store gets at most this much, and one line, for each line written: some 300 steps a piece."""


class MetricsError(StoreError):
    """The metrics of a run cannot be read or may not be written; the text names the file and says what to do."""


class MetricsWriter:
    """Appends lines to the metrics of the run at `run_url` (any fsspec URL; `storage_options` go to its file system).

    Without `resume_step` the run must have no metrics yet. With it, writing goes on after the last whole line: lines whose `step` is over
    `resume_step` belong to work that the checkpoint does not hold and are dropped, the rest stay; -1, where there is no checkpoint, drops
    all. While `ours` says that the run may be another process's by now, lines wait for it to say otherwise, since that one writes to the same
    places; what still waits at the end is dropped. Raises `MetricsError` for metrics in the way or broken ones, and what the store raises
    where it cannot be written.
    """

    def __init__(
        self, run_url: str, storage_options: Mapping[str, Any] | None = None, *, resume_step: int | None = None,
        ours: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._ours, self._waiting = ours, b""
        self._store = ObjectStore(run_url, storage_options, durable=True)
        self._local = Path(self._store.url) if "://" not in self._store.url else None
        pieces = _pieces(self._store)
        if pieces and resume_step is None:
            raise MetricsError(f"{self._store.url}/{pieces[0]} holds the metrics of an earlier run; resume that run or name another one")
        self._index = max(len(pieces) - 1, 0)
        self._piece = b""
        if resume_step is not None:
            for path in pieces:
                self._piece = self._drop_after(resume_step, path)
        self._events = EventLog(self._store, FOLDER, local=self._local is not None, purge_from=None if resume_step is None else resume_step + 1)
        self.write({"kind": "start" if resume_step is None else "resume", "step": max(resume_step or 0, 0), "time": time.time()})

    def write(self, line: Mapping[str, Any]) -> None:
        """Stores one line; numbers that JSON cannot hold (NaN, infinities) become null. A line with `step` also goes to TensorBoard."""
        clean = _finite(line)
        self._waiting += json.dumps(clean, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self._store_waiting()
        if "step" in clean and clean.get("kind") in ("step", "evaluation"):
            self._events.add(clean)

    def _store_waiting(self) -> None:
        if not self._waiting or not self._ours():
            return
        data, self._waiting = self._waiting, b""
        if self._local is not None:
            _append(self._local / FOLDER / _piece_name(self._index), data)
        else:
            if self._piece and len(self._piece) + len(data) > PIECE_BYTES:
                self._index, self._piece = self._index + 1, b""
            self._piece += data
            self._store.write(f"{FOLDER}/{_piece_name(self._index)}", self._piece)

    def flush(self) -> None:
        """Brings TensorBoard's events to the store too (lines are there already)."""
        self._events.flush()

    def close(self) -> None:
        """Flushes and ends TensorBoard's file; writing afterwards is an error."""
        self._store_waiting()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _drop_after(self, step: int, path: str) -> bytes:
        """Rewrites one piece without the lines after `step` and without a torn last one; returns what stays.

        Piece by piece, so that a crash in between leaves whole lines only and doing it again finishes the work.
        """
        data = self._store.read(path)
        kept = b"".join(raw for raw, line in _lines(data, path) if not line.get("step", 0) > step)
        if kept != data:
            self._store.write(path, kept)
        return kept


def read_metrics(run_url: str, storage_options: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """All whole lines in the order of writing; none if the run has no metrics. A last line that is still being written is left out."""
    store = ObjectStore(run_url, storage_options)
    return [line for path in _pieces(store) for _, line in _lines(store.read(path), path)]


def _piece_name(index: int) -> str:
    return "metrics.jsonl" if index == 0 else f"metrics-{index:05d}.jsonl"


def _pieces(store: ObjectStore) -> list[str]:
    """The pieces that exist, first to last; they are numbered without a gap."""
    there = set(store.list(FOLDER))
    found: list[str] = []
    while (path := f"{FOLDER}/{_piece_name(len(found))}") in there:
        found.append(path)
    return found


def _lines(data: bytes, path: str) -> list[tuple[bytes, dict[str, Any]]]:
    found = []
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        if not raw.endswith(b"\n"):
            break
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise MetricsError(f"line {number} of {path} is no JSON ({error}); remove that line to go on") from error
        if not isinstance(line, dict):
            raise MetricsError(f"line {number} of {path} is no JSON object; remove that line to go on")
        found.append((raw, line))
    return found


def _append(path: Path, data: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise MetricsError(f"can't write to {path}: {error.strerror}; see to that, and go on with --resume") from error


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
