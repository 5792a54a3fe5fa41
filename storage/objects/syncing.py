"""Brings what one publish writes to the disk, while it writes on; owns the threads and the order of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

_AT_ONCE = 2
"""The disk is kept busy by one file while another one's entry is being recorded."""

_MOST_WAITING = 8
"""Files that are written and not yet on the disk, each of them open: a disk that is slower than the writers holds them up."""


class Syncing:
    """Files in the order in which they were written; each is put in its place once its content is on the disk.

    A folder's list of names follows once, at the end, in place of once a file: until the commit, no name of them has to last.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sync")
        self._room = threading.BoundedSemaphore(_MOST_WAITING)
        self._under_way: list[Future[None]] = []
        self._folders: dict[str, None] = {}

    def file(self, descriptor: int, name: str, target: str) -> None:
        """Syncs an open file, which it closes, and then renames it, or removes it if that fails. Waits only while too many are under way."""
        self._room.acquire()
        self._under_way.append(self._pool.submit(self._settle, descriptor, name, target))

    def folders(self, folders: Sequence[str]) -> None:
        """Has the lists of names of `folders` synced at the end."""
        self._folders.update(dict.fromkeys(folders))

    def finish(self, *, failed: bool) -> None:
        """Returns once all is on the disk, or raises the first OSError; if the writing has `failed`, once nothing is under way.

        Folders are synced also then: whoever writes next finds them there, and takes them for recorded.
        """
        self._pool.shutdown(wait=True)
        errors = [error for settled in self._under_way if (error := settled.exception()) is not None]
        for folder in self._folders:
            try:
                sync_folder(folder)
            except OSError as error:
                errors.append(error)
        if errors and not failed:
            raise errors[0]

    def _settle(self, descriptor: int, name: str, target: str) -> None:
        try:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(name, target)
        except OSError:
            remove(name)
            raise
        finally:
            self._room.release()


def sync_folder(folder: str) -> None:
    """Brings a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(name: str) -> None:
    """Deletes a file, unless it is gone already."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(name)
