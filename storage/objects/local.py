"""Objects as files under a folder, each whole or absent; owns temporary files, renames and links, raises plain OSErrors."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO

import numpy as np

from storage.errors import UnsafePath
from storage.objects import paths
from storage.objects.file_bytes import fill, put
from storage.objects.info import ObjectInfo
from storage.objects.spans import Bytes, Seen


class LocalObjects:
    """Files under `root`, which is made on the first write. `durable` writes reach the disk (fsync) before they count."""

    def __init__(self, root: str, *, durable: bool = False) -> None:
        self._root = os.path.realpath(os.path.expanduser(root))
        self._durable = durable
        # Two copy and count in turns; with more, some wait for the disk meanwhile.
        self.parallel = 4 if durable else 2

    @property
    def url(self) -> str:
        return self._root

    def read(self, path: str) -> bytes:
        with self._opened(path) as file:
            return file.readall()

    def read_into(self, path: str, buffers: Sequence[Bytes], start: int, seen: Seen | None = None) -> int:
        """Fills `buffers` from byte `start`; the object's whole size in bytes."""
        with self._opened(path) as file:
            fill(file.fileno(), buffers, start, seen)
            return os.fstat(file.fileno()).st_size

    def write(self, path: str, parts: Sequence[Bytes]) -> None:
        target = self._file(path)
        with self._temporary(target, parts) as temporary:
            os.replace(temporary, target)
        self._sync_folder(target)

    def create(self, path: str, data: bytes) -> bool:
        target = self._file(path)
        try:
            with self._temporary(target, [np.frombuffer(data, dtype=np.uint8)]) as temporary:
                # A link appears whole and only if the name is free; opening with O_EXCL would show an empty file first.
                os.link(temporary, target)
        except FileExistsError:
            return False
        self._sync_folder(target)
        return True

    def infos(self, prefix: str) -> list[ObjectInfo]:
        return self._walk(prefix, temporary=False)

    def temporaries(self) -> list[ObjectInfo]:
        """Files that writers are filling, or left when they died."""
        return self._walk("", temporary=True)

    def _walk(self, prefix: str, *, temporary: bool) -> list[ObjectInfo]:
        start = self._file(prefix) if prefix else self._root
        found = []
        for folder, _, names in os.walk(start, onerror=_raise_unless_absent):
            for name in names:
                path = os.path.join(folder, name)
                if name.startswith(paths.TEMPORARY) is not temporary:
                    continue
                with suppress(FileNotFoundError):  # deleted between the two looks
                    status = os.stat(path, follow_symlinks=False)
                    found.append(ObjectInfo(os.path.relpath(path, self._root), status.st_size, status.st_mtime))
        return sorted(found)

    def exists(self, path: str) -> bool:
        return os.path.isfile(self._file(path))

    def delete(self, path: str, recursive: bool) -> None:
        target = self._file(path)
        with suppress(FileNotFoundError):
            if recursive and os.path.isdir(target):
                shutil.rmtree(target)
            else:
                os.unlink(target)

    def _opened(self, path: str) -> FileIO:
        """The file, open for reading; OSError for anything else of its name: opening a pipe would wait for a writer, and for ever."""
        file = FileIO(self._file(path), opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "it isn't a regular file")
        return file

    def _file(self, path: str) -> str:
        full = os.path.join(self._root, path)
        # The name is plain, so only a link planted inside of the store can still lead out of it.
        if os.path.realpath(full) != full:
            raise UnsafePath(f"{path!r} in {self._root} goes through a symbolic link; a store holds plain files only")
        return full

    @contextmanager
    def _temporary(self, target: str, parts: Sequence[Bytes]) -> Iterator[str]:
        """A closed file with `parts` in `target`'s folder; gone at the end unless it was renamed."""
        folder = os.path.dirname(target)
        name = os.path.join(folder, paths.TEMPORARY + uuid.uuid4().hex)
        try:
            try:
                file = open(name, "xb", buffering=0)  # noqa: SIM115  closed right below
            except FileNotFoundError:
                self._make(folder)
                file = open(name, "xb", buffering=0)  # noqa: SIM115
            with file:
                put(file.fileno(), parts)
                if self._durable:
                    os.fsync(file.fileno())
            yield name
        finally:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(name)

    def _make(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        while folder.startswith(self._root):  # a new folder has reached the disk once its parent's list of names has
            self._sync_folder(folder)
            folder = os.path.dirname(folder)

    def _sync_folder(self, target: str) -> None:
        if not self._durable:
            return
        descriptor = os.open(os.path.dirname(target), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a folder that isn't there yet, or was deleted meanwhile, has nothing in it
        raise error
