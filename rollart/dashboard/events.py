"""Writes TensorBoard scalars into a run's folder on any file system, without torch.

Owns the event files; the metrics' lines are not its business.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from storage.errors import StoreUnreachable
from storage.objects.store import ObjectStore

__all__ = ["EventLog", "scalars"]

ROLL_BYTES = 512 * 1024
"""Where events are uploaded, a file is closed at this size, since every flush sends the whole file."""

FLUSH_SECONDS = 10.0
"""How old an event may get before it is in the store; TensorBoard itself reloads every 30 s."""


class EventLog:
    """Event files in `folder` of `store`. Where that is a `local` one they are written in place; for others they are written in a temporary
    folder and sent at each flush, as new files once they reach `ROLL_BYTES`. StoreError where that can't be done.

    `purge_from` tells TensorBoard to forget earlier events from that step on: a resumed run writes them again.
    """

    def __init__(self, store: ObjectStore, folder: str, *, local: bool, purge_from: int | None = None) -> None:
        self._store, self._folder = store, folder
        self._scratch = tempfile.TemporaryDirectory(prefix="rollart-events-") if not local else None
        self._writer = self._open()
        self._flushed = time.monotonic()
        if purge_from is not None:
            self._writer.add_event(Event(wall_time=time.time(), step=purge_from, session_log=SessionLog(status=SessionLog.START)))

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds every number in a metrics line under its path (`reward/frozenlake`), at the line's `step` and `time`."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
        self._writer.add_event(Event(wall_time=line.get("time") or time.time(), step=int(line["step"]), summary=Summary(value=values)))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Brings all events to the store."""
        with self._told():
            self._writer.flush()
        self._flushed = time.monotonic()
        if self._scratch is not None and self._send(self._scratch) > ROLL_BYTES:
            self._writer.close()
            for file in Path(self._scratch.name).iterdir():
                file.unlink()
            self._writer = self._open()

    def close(self) -> None:
        """Flushes and closes; nothing is left in the temporary folder."""
        with self._told():
            self._writer.close()
        if self._scratch is not None:
            self._send(self._scratch)
            self._scratch.cleanup()

    def _open(self) -> EventFileWriter:
        with self._told():
            return EventFileWriter(self._scratch.name if self._scratch is not None else str(Path(self._store.url) / self._folder))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """TensorBoard's errors as the store's."""
        try:
            yield
        except OSError as error:
            raise StoreUnreachable(f"can't write events to {self._store.url}/{self._folder}: {error}") from error

    def _send(self, scratch: tempfile.TemporaryDirectory[str]) -> int:
        """Uploads what the temporary folder holds (the one file in use); returns its bytes."""
        size = 0
        for file in Path(scratch.name).iterdir():
            data = file.read_bytes()
            self._store.write(f"{self._folder}/{file.name}", data)
            size += len(data)
        return size


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers in a metrics line, by path; `step`, `time` and what is no number are left out.

    An evaluation's stand under `evaluation/`.
    """
    prefix = "evaluation/" if line.get("kind") == "evaluation" else ""
    for key, value in line.items():
        if key not in ("step", "time"):
            yield from _numbers(prefix + key, value)


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{path}/{key}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)
