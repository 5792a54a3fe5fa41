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

from storage.errors import UnsafePath
from storage.objects import paths
from storage.objects.file_bytes import fill, put
from storage.objects.info import ObjectInfo
from storage.objects.spans import Bytes, Content, Seen
from storage.objects.syncing import Syncing, remove, sync_folder


class LocalObjects:
    """Files under `root`, which is made on the first write. `durable` writes reach the disk (fsync) before they count."""

    parallel = 2  # two copy and count in turns; more only wait for each other

    def __init__(self, root: str, *, durable: bool = False) -> None:
        self._root = os.path.realpath(os.path.expanduser(root))
        self._durable = durable
        self._syncing: Syncing | None = None

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

    def write(self, path: str, content: Content) -> None:
        target = self._file(path)
        folder = os.path.dirname(target)
        if self._syncing is not None:
            self._write_behind(target, content, self._syncing)
            self._syncing.folders([folder])
            return
        with self._temporary(folder, content) as temporary:
            os.replace(temporary, target)
        self._sync([folder])

    def create(self, path: str, data: bytes) -> bool:
        target = self._file(path)
        folder = os.path.dirname(target)
        try:
            with self._temporary(folder, Content.of(data)) as temporary:
                # A link appears whole and only if the name is free; opening with O_EXCL would show an empty file first.
                os.link(temporary, target)
        except FileExistsError:
            return False
        self._sync([folder])
        return True

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is written through this object within is on the disk at the end: files are synced while others are written, and appear
        then, each folder once."""
        if not self._durable or self._syncing is not None:
            yield
            return
        self._syncing = syncing = Syncing()
        failed = True
        try:
            yield
            failed = False
        finally:
            self._syncing = None
            syncing.finish(failed=failed)

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
    def _temporary(self, folder: str, content: Content) -> Iterator[str]:
        """A closed file with `content` in `folder`; gone at the end unless it was renamed."""
        with self._opened_new(folder) as (name, file):
            with file:
                put(file.fileno(), content)
                if self._durable:
                    os.fsync(file.fileno())
            yield name
            remove(name)

    def _write_behind(self, target: str, content: Content, syncing: Syncing) -> None:
        with self._opened_new(os.path.dirname(target)) as (name, file), file:
            put(file.fileno(), content)
            # (An error of the disk is told to those who had the file open when it came.)
            syncing.file(os.dup(file.fileno()), name, target)

    @contextmanager
    def _opened_new(self, folder: str) -> Iterator[tuple[str, FileIO]]:
        """A new file in `folder`, which is made if it isn't there; gone if what is done with it fails."""
        name = os.path.join(folder, paths.TEMPORARY + uuid.uuid4().hex)
        try:
            file = FileIO(name, "xb")
        except FileNotFoundError:
            self._make(folder)
            file = FileIO(name, "xb")
        try:
            yield name, file
        except BaseException:
            remove(name)
            raise

    def _make(self, folder: str) -> None:
        """Makes a folder. It has reached the disk once its parent's list of names has, and so have the parents that are new."""
        last = self._root
        while not os.path.isdir(os.path.dirname(last)):
            last = os.path.dirname(last)
        os.makedirs(folder, exist_ok=True)
        parents = [os.path.dirname(folder)]
        while folder != last:
            folder = parents[-1]
            parents.append(os.path.dirname(folder))
        self._sync(parents)

    def _sync(self, folders: Sequence[str]) -> None:
        """Brings the folders' lists of names to the disk, now or with what is written `together`."""
        if self._syncing is not None:
            self._syncing.folders(folders)
        elif self._durable:
            for folder in folders:
                sync_folder(folder)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a folder that isn't there yet, or was deleted meanwhile, has nothing in it
        raise error
