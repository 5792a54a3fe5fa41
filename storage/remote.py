"""Objects behind an fsspec file system (S3, GCS, memory, ...); owns conditional creation there, raises what the clients raise."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt

from storage.client_errors import client_errors, s3_code
from storage.object_info import ObjectInfo

_CREATE_ATTEMPTS = 5
"""A server may answer 409 to a conditional write that met another one; it is then asked again, this often at most."""
_CREATE_PAUSE_S = 0.05
_RANGE_NOT_SATISFIABLE = 416
_memory_lock = threading.Lock()
"""fsspec's memory store looks, then writes; within this process (its whole world) the lock makes that one action."""

Bytes = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)


class RemoteObjects:
    """Objects under `url`. Only the client's blocking calls are used, so one instance never mixes event loops."""

    parallel = 4
    """How many requests at once pay off: enough to hide a round trip, few enough for the memory that they hold."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._fs, root = fsspec.core.url_to_fs(url, **options)
        self._root = str(root).rstrip("/")
        self._is_memory = url.startswith("memory://")
        if self._is_memory:
            self.parallel = 1

    def read(self, path: str) -> bytes:
        return bytes(self._fs.cat_file(self._key(path)))

    def read_into(self, path: str, buffers: Sequence[Bytes], start: int) -> int:
        """Fills `buffers` from byte `start`; how far the object was seen to reach, in bytes."""
        # One byte more than wanted tells an object that is too long from one that fits, without a second request.
        wanted = sum(map(len, buffers))
        try:
            data = self._fs.cat_file(self._key(path), start=start, end=start + wanted + 1)
        except client_errors() as error:
            if s3_code(error) == "InvalidRange" or getattr(error, "code", None) == _RANGE_NOT_SATISFIABLE:
                return start  # the object ends at `start` or before it
            raise
        at = 0
        for buffer in buffers:
            taken = max(0, min(len(data) - at, len(buffer)))
            buffer[:taken] = np.frombuffer(data, dtype=np.uint8, count=taken, offset=at if taken else 0)
            at += taken
        return start + len(data)

    def write(self, path: str, parts: Sequence[Bytes]) -> None:
        self._fs.pipe_file(self._key(path), b"".join(part.data for part in parts))

    def create(self, path: str, data: bytes) -> bool:
        if self._is_memory:
            with _memory_lock:
                return self._create(path, data)
        return self._create(path, data)

    def _create(self, path: str, data: bytes) -> bool:
        attempt = 0
        while True:
            attempt += 1
            try:
                self._fs.pipe_file(self._key(path), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                code = s3_code(error)
                if code == "PreconditionFailed":  # s3fs recognises it only if the server's reply names the condition
                    return False
                conflict = code in {"ConditionalRequestConflict", "OperationAborted", "409"} or error.errno == errno.EBUSY
                if not conflict or attempt == _CREATE_ATTEMPTS:
                    raise
                _log.warning("creating %s met another writer (%s); attempt %d of %d", path, code, attempt, _CREATE_ATTEMPTS)
                time.sleep(_CREATE_PAUSE_S * attempt)
            else:
                return True

    def infos(self, prefix: str) -> list[ObjectInfo]:
        self._fs.invalidate_cache()  # a listing that was kept would hide what others committed since
        start = self._key(prefix) if prefix else self._root
        skipped = len(self._root) + 1
        found = self._fs.find(start, detail=True)
        return sorted(ObjectInfo(name[skipped:], int(info["size"]), _modified(info)) for name, info in found.items() if name.startswith(start + "/"))

    def exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        try:
            return bool(self._fs.info(self._key(path))["type"] == "file")
        except FileNotFoundError:
            return False

    def delete(self, path: str, recursive: bool) -> None:
        self._fs.invalidate_cache()
        try:
            self._fs.rm(self._key(path), recursive=recursive)
        except FileNotFoundError:
            return

    def _key(self, path: str) -> str:
        return f"{self._root}/{path}"


def _modified(info: Mapping[str, Any]) -> float:
    """The time of a listing's entry, under the name that each client gives it."""
    found = info.get("LastModified") or info.get("mtime") or info.get("updated") or info.get("created")
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return found.timestamp()
    if isinstance(found, int | float):
        return float(found)
    raise OSError(errno.ENOTSUP, f"the client lists objects without their time; it says {', '.join(sorted(info))}")
