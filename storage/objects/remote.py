"""Objects behind an fsspec client (S3, GCS, memory, ...); owns conditional creation there and which requests are tried again."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import fsspec
import numpy as np
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem
from fsspec.utils import tokenize

from storage.objects import client_errors
from storage.objects.clients import open_client, refusal
from storage.objects.info import ObjectInfo
from storage.objects.retries import retried
from storage.objects.spans import Bytes, Content, Seen, spread, total

WRITE_S = 30.0
SLOWEST_BYTES_PER_S = 0.5e6
"""A write may take WRITE_S and what its bytes take at this rate. The clients' own time-outs are about replies: a server that stops
reading in the middle of an upload would hold them for ever."""

_MARK = "attempt"
"""User metadata of a created object: which call of `create` it comes from."""
_MARK_OPTION = {"s3": "Metadata", "gcs": "metadata"}

_CREATE_PART = 2**30
"""Below this a creation is one request: not every server keeps the condition of an upload in parts."""

_memory_lock = threading.Lock()
"""fsspec's memory store looks, then writes, and lists a dictionary that others may change meanwhile; within this process (its whole
world) the lock makes each call one action."""


def _renew_lock() -> None:
    global _memory_lock
    _memory_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # a thread that held it is not in the child

R = TypeVar("R")


class RemoteObjects:
    """Objects under `url`. Only the client's blocking calls are used, so one instance never mixes event loops.

    Raises what the clients raise, or GaveUp after passing errors; `scrubbed` makes texts fit for a log.
    """

    parallel = 4
    """How many requests at once pay off: enough to hide a round trip, few enough for the memory that they hold."""

    def __init__(self, url: str, options: Mapping[str, Any], scrubbed: Callable[[str], str] = str) -> None:
        client = open_client(url, options)
        self._fs, self._root, self._kind = client.fs, client.root, client.kind
        self._options = dict(options)
        self._scrubbed = scrubbed
        self.place = f"{self._kind} {self._root.partition('/')[0]} {tokenize(options)}"
        """Which server and bucket this is, as far as a process can tell its places apart; holds no credential."""
        if self._kind == "memory":
            self.parallel = 1

    @property
    def creates_for_sure(self) -> bool:
        """Whether a creation can't overwrite, without asking the server."""
        return self._kind == "memory"

    def read(self, path: str) -> bytes:
        key = self._key(path)
        # Else s3fs asks for the size first, to read large objects in parts.
        options = {"max_concurrency": 1} if self._kind == "s3" else {}
        return bytes(self._retried(lambda: self._call("cat_file", key, **options), "reading", path))

    def read_into(self, path: str, buffers: Sequence[Bytes], start: int, seen: Seen | None = None) -> int:
        """Fills `buffers` from byte `start`; how far the object was seen to reach, in bytes."""
        # One byte more than wanted tells an object that is too long from one that fits, without a second request.
        wanted = total(buffers)
        key = self._key(path)
        try:
            data = self._retried(lambda: self._call("cat_file", key, start=start, end=start + wanted + 1), "reading", path)
        except client_errors.client_errors() as error:
            if client_errors.is_past_end(error):
                return start  # the object ends at `start` or before it
            raise
        spread(np.frombuffer(data, dtype=np.uint8), buffers)
        if seen is not None:
            seen(buffers)
        return start + len(data)

    def write(self, path: str, content: Content) -> None:
        key = self._key(path)
        data = b"".join(part.data for part in content.parts())
        self._retried(lambda: self._call("pipe_file", key, data, seconds=_write_seconds(data)), "writing", path)

    def create(self, path: str, data: bytes) -> bool:
        key = self._key(path)
        mark = uuid.uuid4().hex
        options: dict[str, Any] = {"mode": "create"}
        if self._kind in _MARK_OPTION:
            options |= {_MARK_OPTION[self._kind]: {_MARK: mark}, "chunksize": _CREATE_PART}
        try:
            self._retried(lambda: self._call("pipe_file", key, data, seconds=_write_seconds(data), **options), "creating", path, conflicts=True)
        except OSError as error:
            if not client_errors.is_refused_condition(error):
                raise
            # A request whose reply was lost is sent again, by us or by the HTTP client, and then refused by its own object.
            return self._marked(path, mark)
        return True

    def _marked(self, path: str, mark: str) -> bool:
        if self._kind not in _MARK_OPTION:
            return False
        key = self._key(path)
        self._fs.invalidate_cache()
        try:
            return bool(self._retried(lambda: self._call("getxattr", key, _MARK), "looking at", path) == mark)
        except (KeyError, FileNotFoundError):  # an object without the mark, or one that was deleted meanwhile, isn't ours
            return False

    def infos(self, prefix: str) -> list[ObjectInfo]:
        start = self._key(prefix) if prefix else self._root
        skipped = len(self._root) + 1
        found = self._retried(lambda: self._find(start), "listing", prefix)
        return sorted(ObjectInfo(name[skipped:], int(info["size"]), _modified(info)) for name, info in found.items())

    def exists(self, path: str) -> bool:
        key = self._key(path)
        self._fs.invalidate_cache()
        try:
            return bool(self._retried(lambda: self._call("info", key), "looking for", path)["type"] == "file")
        except FileNotFoundError:
            return False

    def delete(self, path: str, recursive: bool) -> None:
        key = self._key(path)
        self._fs.invalidate_cache()
        try:
            if not recursive:
                self._retried(lambda: self._call("rm_file", key), "deleting", path)
                return
            before = self._retried(lambda: self._find(key), "listing", path)
            if before:
                self._retried(lambda: self._call("rm", key, recursive=True), "deleting", path)
        except FileNotFoundError:
            return
        left = before.keys() & self._retried(lambda: self._find(key), "listing", path).keys() if before else set()
        if left:  # s3fs says nothing of the objects that the server refused to delete
            raise PermissionError(errno.EACCES, f"the server kept {len(left)} of {len(before)} objects, such as {min(left)[len(self._root) + 1 :]}")

    def _find(self, start: str) -> dict[str, Any]:
        """What the client says of all objects under the folder `start`, by name."""
        self._fs.invalidate_cache()  # a listing that was kept would hide what others committed since
        found = self._call("find", start, detail=True) if _lists_at_once(self._fs) else self._walked(start)
        return {name: info for name, info in found.items() if name.startswith(start + "/") and info["type"] == "file"}

    def _walked(self, start: str) -> dict[str, Any]:
        """What is under a folder, one listing after the other: fsspec's own walk takes a folder that can't be listed for an empty one."""
        found: dict[str, Any] = {}
        folders = [start]
        while folders:
            folder = folders.pop()
            try:
                listed = self._call("ls", folder, detail=True)
            except FileNotFoundError:  # a folder that isn't there yet, or was deleted meanwhile, has nothing in it
                continue
            for info in listed:
                name = info["name"].rstrip("/")
                if info["type"] != "directory":
                    found[name] = info
                elif name.startswith(folder + "/"):
                    folders.append(name)
        return found

    def _retried(self, work: Callable[[], R], doing: str, path: str, *, conflicts: bool = False) -> R:
        def passing(error: Exception) -> bool:
            return client_errors.is_passing(error) or (conflicts and client_errors.is_conflict(error))

        return retried(work, f"{doing} {self._key(path)}", passing, self._scrubbed)

    def _call(self, method: str, *args: Any, seconds: float | None = None, **options: Any) -> Any:
        """The client's blocking call, stopped after `seconds` where the client can be."""
        try:
            if self._kind == "memory":
                with _memory_lock:
                    return getattr(self._fs, method)(*args, **options)
            if not self._fs.async_impl:
                return getattr(self._fs, method)(*args, **options)

            async def bounded() -> Any:
                async with asyncio.timeout(seconds):
                    return await getattr(self._fs, f"_{method}")(*args, **options)

            return fsspec.asyn.sync(self._fs.loop, bounded)
        except ValueError as error:  # gcsfs's word for a request that the server calls invalid
            raise OSError(errno.EINVAL, str(error)) from error
        except (TypeError, AttributeError) as error:  # s3fs and others look at most of their options only now
            if not self._options:
                raise
            raise refusal(error, self._options) from error

    def _key(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _lists_at_once(fs: Any) -> bool:
    """Whether a client has its own way of listing all under a folder, which costs fewer requests and raises what goes wrong."""
    if fs.async_impl:
        return type(fs)._find is not AsyncFileSystem._find
    return type(fs).find is not AbstractFileSystem.find


def _write_seconds(data: bytes) -> float:
    return WRITE_S + len(data) / SLOWEST_BYTES_PER_S


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
