"""One way to read and write objects on any URL; owns path safety, typed errors and secrecy, knows nothing of versions."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from storage import paths
from storage.client_errors import client_errors
from storage.errors import ConditionIgnored, ForkedStore, ObjectMissing, StoreError, StoreUnreachable
from storage.local import LocalObjects
from storage.object_info import ObjectInfo
from storage.remote import RemoteObjects

Bytes = npt.NDArray[np.uint8]
Data = bytes | Bytes | Sequence[Bytes]
"""An object's content; a sequence stands for its parts back to back, so that they need not be copied together first."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_USER = re.compile(r"://[^/@]*@")
_SECRET = re.compile(r"key|secret|token|pass|cred|sas|auth|sign", re.IGNORECASE)


class Backend(Protocol):
    """The calls that a kind of store has to answer, with checked paths; errors are the client's own."""

    parallel: int

    def read(self, path: str) -> bytes: ...
    def read_into(self, path: str, buffers: Sequence[Bytes], start: int) -> int: ...
    def write(self, path: str, parts: Sequence[Bytes]) -> None: ...
    def create(self, path: str, data: bytes) -> bool: ...
    def infos(self, prefix: str) -> list[ObjectInfo]: ...
    def exists(self, path: str) -> bool: ...
    def delete(self, path: str, recursive: bool) -> None: ...


class ObjectStore:
    """Objects under `url`: a local path, or any URL that fsspec opens (`s3://`, `gs://`, `memory://`, ...).

    `storage_options` go to the fsspec client; credentials given there appear in no error and no repr. `durable` makes local
    writes reach the disk before they return. Errors of all calls: StoreUnreachable, ObjectMissing, UnsafePath. Instances
    travel by pickle as URL and options, and open their own client where they arrive. After a fork they raise ForkedStore, since
    the threads behind a client stay in the parent.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, *, durable: bool = False) -> None:
        self._options = dict(storage_options or {})
        self._durable = durable
        self._process = os.getpid()
        self._url = str(url).rstrip("/") or "/"
        self._secrets = tuple(_secrets(self._options))
        scheme = _SCHEME.match(self._url)
        if "::" in self._url:
            raise StoreUnreachable(f"{self.url}: chained URLs aren't stores, since a cache between would hide new versions")
        self._backend: Backend
        with self._translated("opening", also=ValueError):  # fsspec's word for a protocol or an option that it doesn't know
            if scheme is None or scheme[1] in {"file", "local"}:
                local = LocalObjects(self._url if scheme is None else self._url[scheme.end() :], durable=durable)
                self._url = local.url
                self._backend = local
            else:
                self._backend = RemoteObjects(self._url, self._options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (type(self), self._url, self._options, self._durable)

    @property
    def url(self) -> str:
        """The store's URL without user and password; for a local store, its absolute path."""
        return _USER.sub("://", self._url)

    @property
    def parallel(self) -> int:
        """How many requests at once pay off on this store."""
        return self._backend.parallel

    def child(self, prefix: str) -> ObjectStore:
        """The store of what is under `prefix`."""
        return type(self)(f"{self._url}/{paths.checked(prefix)}", self._options, durable=self._durable)

    def read(self, path: str) -> bytes:
        """The whole object; ObjectMissing if there is none."""
        with self._translated("reading", paths.checked(path)):
            return self._backend.read(path)

    def read_into(self, path: str, buffer: Bytes | Sequence[Bytes], start: int = 0) -> int:
        """Fills `buffer`, or several one after the other, with the object's bytes from `start` on; where the object ends, or, if it
        goes on after what was asked for, at least one byte more than that."""
        buffers = [buffer] if isinstance(buffer, np.ndarray) else buffer
        with self._translated("reading", paths.checked(path)):
            return self._backend.read_into(path, buffers, start)

    def doubt(self, path: str) -> bool:
        """For a reader that finds other bytes in `path` than were written: whether this thread's next read of it may bring better
        ones. A store gives what it has; one that reads from copies first can go to the original."""
        paths.checked(path)
        return False

    def write(self, path: str, data: Data) -> None:
        """Puts an object, whole or not at all, in place of any that was there."""
        with self._translated("writing", paths.checked(path)):
            self._backend.write(path, _parts(data))

    def create(self, path: str, data: bytes) -> bool:
        """Puts an object only if there is none; whether it was put. Of any number of racing callers one gets True."""
        with self._translated("creating", paths.checked(path)):
            return self._backend.create(path, data)

    def infos(self, prefix: str = "") -> list[ObjectInfo]:
        """Path, size and time of all objects under the folder `prefix`, by path, as they are now: never from a cache."""
        with self._translated("listing", paths.checked(prefix) if prefix else ""):
            return self._backend.infos(prefix)

    def list(self, prefix: str = "") -> list[str]:
        """Sorted paths of all objects under the folder `prefix`, as they are now: never from a cache."""
        return [info.path for info in self.infos(prefix)]

    def exists(self, path: str) -> bool:
        """Whether there is an object of exactly this path."""
        with self._translated("looking for", paths.checked(path)):
            return self._backend.exists(path)

    def delete(self, path: str, recursive: bool = False) -> None:
        """Removes an object, or with `recursive` all under a folder; no error if there is nothing."""
        with self._translated("deleting", paths.checked(path)):
            self._backend.delete(path, recursive)

    def check_writable(self) -> None:
        """Raises one StoreUnreachable, saying what to do, unless objects can be created, only once, read and deleted here."""
        probe = f"probe-{uuid.uuid4().hex}"
        try:
            self.create(probe, b"probe")
            twice = self.create(probe, b"probe")
            self.read(probe)
            self.delete(probe)
        except StoreError as error:
            raise StoreUnreachable(
                f"can't write to {self.url}: check that the folder or bucket exists, that its permissions and your credentials allow "
                f"writing, and that the address is right ({error})"
            ) from error.__cause__
        if twice:
            raise ConditionIgnored(
                f"{self.url} overwrites objects that it was asked only to create; use a server with conditional writes "
                "(If-None-Match), or make sure that only one process ever publishes here"
            )

    @contextmanager
    def _translated(self, doing: str, path: str = "", also: type[Exception] = OSError) -> Iterator[None]:
        where = f"{self.url}/{path}" if path else self.url
        if os.getpid() != self._process:
            raise ForkedStore(f"{doing} {where}: this store was opened before a fork; open a new one in the new process, or spawn instead of fork")
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise ObjectMissing(self._scrubbed(f"{where} doesn't exist ({doing} it)")) from self._cause(error)
        except (also, *client_errors()) as error:
            text = self._scrubbed(f"{doing} {where} failed: {type(error).__name__}: {error}")
            raise StoreUnreachable(text) from self._cause(error)

    def _scrubbed(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _USER.sub("://", text)

    def _cause(self, error: Exception) -> Exception | None:
        """`error`, for the traceback, unless that would show a credential."""
        text = f"{error} {error.__cause__}"
        return error if self._scrubbed(text) == text else None


def _parts(data: Data) -> Sequence[Bytes]:
    if isinstance(data, bytes):
        return [np.frombuffer(data, dtype=np.uint8)]
    return [data] if isinstance(data, np.ndarray) else data


def _reopen(kind: type[ObjectStore], url: str, options: dict[str, Any], durable: bool) -> ObjectStore:
    return kind(url, options, durable=durable)


def _secrets(options: Mapping[str, Any], *, inside: bool = False) -> Iterator[str]:
    for name, value in options.items():
        secret = inside or _SECRET.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from _secrets(value, inside=secret)
        elif secret and isinstance(value, str) and len(value) > 3:
            yield value
