"""One way to read and write objects on any URL; owns path safety, typed errors and secrecy, knows nothing of versions."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np

from storage.errors import ConditionIgnored, ForkedStore, ObjectMissing, StoreError, StoreUnreachable
from storage.objects import client_errors, credentials, paths
from storage.objects.conditions import RULE, condition_of
from storage.objects.info import ObjectInfo
from storage.objects.local import LocalObjects
from storage.objects.remote import RemoteObjects
from storage.objects.spans import Bytes, Content, Seen

Data = bytes | Bytes | Sequence[Bytes] | Content
"""An object's content; a sequence stands for its parts back to back, so that they need not be copied together first."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Backend(Protocol):
    """The calls that a kind of store has to answer, with checked paths; errors are the client's own."""

    parallel: int

    def read(self, path: str) -> bytes: ...
    def read_into(self, path: str, buffers: Sequence[Bytes], start: int, seen: Seen | None = None) -> int: ...
    def write(self, path: str, content: Content) -> None: ...
    def create(self, path: str, data: bytes) -> bool: ...
    def infos(self, prefix: str) -> list[ObjectInfo]: ...
    def exists(self, path: str) -> bool: ...
    def delete(self, path: str, recursive: bool) -> None: ...


class ObjectStore:
    """Objects under `url`: a local path, or any URL that fsspec opens (`s3://`, `gs://`, `memory://`, ...).

    `storage_options` go to the fsspec client; credentials given there appear in no error, no log and no repr. `durable` makes
    local writes reach the disk before they return. What passes (throttling, lost connections, ...) is tried again within the
    limits of `storage/objects/retries.py`. The first creation in a process asks a server whether it keeps the condition, and raises
    ConditionIgnored if it doesn't; with `single_writer` that is a warning in the log, and nothing but the caller's word
    then keeps two processes from creating the same object.

    Errors of all calls: StoreUnreachable, ObjectMissing, UnsafePath. Instances travel by pickle as URL and options, and open their
    own client where they arrive. After a fork they raise ForkedStore, since the threads behind a client stay in the parent.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, *, durable: bool = False, single_writer: bool = False) -> None:
        self._options = dict(storage_options or {})
        self._durable = durable
        self._single_writer = single_writer
        self._process = os.getpid()
        self._url = str(url).rstrip("/") or "/"
        self._secrets = tuple(credentials.values(self._options))
        scheme = _SCHEME.match(self._url)
        if not str(url).strip() or ("/" in str(url) and self._url.endswith(":")):  # neither the root of the disk nor a list of all buckets
            raise StoreUnreachable(f"{str(url)!r} names no store: give a path, or a URL such as s3://bucket/run/weights")
        if "::" in self._url:
            raise StoreUnreachable(f"{self.url}: chained URLs aren't stores, since a cache between would hide new versions")
        self._backend: Backend
        with self._translated("opening"):
            if scheme is None or scheme[1] in {"file", "local"}:
                local = LocalObjects(self._url if scheme is None else self._url[scheme.end() :], durable=durable)
                self._url = local.url
                self._backend = local
            else:
                self._backend = RemoteObjects(self._url, self._options, self._scrubbed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (type(self), self._url, self._options, self._durable, self._single_writer)

    @property
    def url(self) -> str:
        """The store's URL without user and password; for a local store, its absolute path."""
        return credentials.without_user(self._url)

    @property
    def parallel(self) -> int:
        """How many requests at once pay off on this store."""
        return self._backend.parallel

    def child(self, prefix: str) -> ObjectStore:
        """The store of what is under `prefix`."""
        self._check_process(f"opening {prefix} of")
        url = f"{self._url}/{paths.checked(prefix)}"
        return type(self)(url, self._options, durable=self._durable, single_writer=self._single_writer)

    def read(self, path: str) -> bytes:
        """The whole object; ObjectMissing if there is none."""
        with self._translated("reading", paths.checked(path)):
            return self._backend.read(path)

    def read_into(self, path: str, buffer: Bytes | Sequence[Bytes], start: int = 0, seen: Seen | None = None) -> int:
        """Fills `buffer`, or several one after the other, with the object's bytes from `start` on; where the object ends, or, if it
        goes on after what was asked for, at least one byte more than that.

        `seen` is given what was read, part by part and in order, while it is in the processor's cache if it can be: to sum it up
        at little cost. What it has seen counts only once this returns, and if all of the bytes were there.
        """
        buffers = [buffer] if isinstance(buffer, np.ndarray) else buffer
        with self._translated("reading", paths.checked(path)):
            return self._backend.read_into(path, buffers, start, seen)

    def doubt(self, path: str) -> bool:
        """For a reader that finds other bytes in `path` than were written: whether this thread's next read of it may bring better
        ones. A store gives what it has; one that reads from copies first can go to the original."""
        paths.checked(path)
        return False

    def write(self, path: str, data: Data) -> None:
        """Puts an object, whole or not at all, in place of any that was there."""
        with self._translated("writing", paths.checked(path), needs_bucket=True):
            self._backend.write(path, Content.of(data))

    def create(self, path: str, data: bytes) -> bool:
        """Puts an object only if there is none; whether it was put. Of any number of racing callers one gets True.

        ConditionIgnored if the server would overwrite (see the class).
        """
        with self._translated("creating", paths.checked(path), needs_bucket=True):
            if self._keeps_condition():
                return self._backend.create(path, data)
            if self._backend.exists(path):
                return False
            self._backend.write(path, Content.of(data))
            return True

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is written through this object within counts only once it ends: on a `durable` local store it reaches the
        disk together by then, which takes less time. Other objects of the same place are as ever."""
        batch = self._backend.together() if isinstance(self._backend, LocalObjects) else nullcontext()
        with self._translated("writing", needs_bucket=True), batch:
            yield

    def infos(self, prefix: str = "") -> list[ObjectInfo]:
        """Path, size and time of all objects under the folder `prefix`, by path, as they are now: never from a cache."""
        with self._translated("listing", paths.checked(prefix) if prefix else "", needs_bucket=True):
            return self._backend.infos(prefix)

    def temporaries(self) -> list[ObjectInfo]:
        """What writers that are at it, or died, keep beside the objects, never shown by `infos`; only a local store has such files."""
        with self._translated("listing"):
            return self._backend.temporaries() if isinstance(self._backend, LocalObjects) else []

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
        probe = f"{paths.PROBE}{uuid.uuid4().hex}"
        try:
            self.create(probe, b"first")
            twice = self.create(probe, b"second")
            self.read(probe)
            self.delete(probe)
        except (ConditionIgnored, ForkedStore):
            raise
        except StoreError as error:
            raise StoreUnreachable(
                f"can't write to {self.url}: check that the folder or bucket exists, that its permissions and your credentials allow "
                f"writing, and that the address is right ({error})"
            ) from error.__cause__
        if twice:
            raise self._ignored()

    def _keeps_condition(self) -> bool:
        """Whether the server keeps conditions, asked once a process; ConditionIgnored if it doesn't and that wasn't expected."""
        remote = self._backend
        if not isinstance(remote, RemoteObjects) or remote.creates_for_sure:
            return True
        kept = condition_of(remote.place).kept(self.url, lambda: _overwrites(remote))
        if not kept and not self._single_writer:
            raise self._ignored()
        return kept

    def _ignored(self) -> ConditionIgnored:
        return ConditionIgnored(
            f"{self.url} overwrites objects that it was asked only to create: use a server with conditional writes (If-None-Match on S3, "
            f"ifGenerationMatch on GCS), or open the store with single_writer=True and keep to the rule that {RULE}"
        )

    @contextmanager
    def _translated(self, doing: str, path: str = "", needs_bucket: bool = False) -> Iterator[None]:
        where = f"{self.url}/{path}" if path else self.url
        self._check_process(doing, path)
        try:
            yield
        except StoreError:
            raise
        except client_errors.client_errors() as error:
            if isinstance(error, FileNotFoundError) and not needs_bucket and client_errors.s3_code(error) != "NoSuchBucket":
                raise ObjectMissing(self._scrubbed(f"{where} doesn't exist ({doing} it)")) from self._cause(error)
            text = f"{doing} {where} failed: {type(error).__name__}: {error}{client_errors.advice(error)}"
            raise StoreUnreachable(self._scrubbed(text)) from self._cause(error)

    def _check_process(self, doing: str, path: str = "") -> None:
        if os.getpid() != self._process:
            where = f"{self.url}/{path}" if path else self.url
            raise ForkedStore(f"{doing} {where}: this store was opened before a fork; open a new one in the new process, or spawn instead of fork")

    def _scrubbed(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return credentials.without_user(text)

    def _cause(self, error: Exception) -> Exception | None:
        """`error`, for the traceback, unless that would show a credential."""
        link: BaseException | None = error
        while link is not None:
            text = str(link)
            if self._scrubbed(text) != text:
                return None
            link = link.__cause__ or link.__context__
        return error


def _overwrites(remote: RemoteObjects) -> bool:
    """Creates an object twice, to see whether the server lets it."""
    probe = f"{paths.PROBE}{uuid.uuid4().hex}"
    try:
        remote.create(probe, b"first")
    except client_errors.client_errors() as error:
        if client_errors.is_no_condition(error):
            return True
        raise
    overwrites = remote.create(probe, b"second")
    remote.delete(probe, recursive=False)
    return overwrites


def _reopen(kind: type[ObjectStore], url: str, options: dict[str, Any], durable: bool, single_writer: bool) -> ObjectStore:
    return kind(url, options, durable=durable, single_writer=single_writer)
