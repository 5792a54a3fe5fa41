"""Locks between the processes of a host, as files; each ends with its holder, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["exclusive", "shared", "try_exclusive", "unlock"]


def exclusive(path: Path) -> int:
    """The lock of `path` for this one holder, to be given to `unlock`; waits for it."""
    return _locked(path, fcntl.LOCK_EX)


def shared(path: Path) -> int:
    """The lock of `path` together with all others that hold it so; waits for an exclusive holder."""
    return _locked(path, fcntl.LOCK_SH)


def try_exclusive(path: Path) -> int | None:
    """The exclusive lock of `path`, or None if somebody holds it."""
    try:
        return _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def unlock(lock: int) -> None:
    """Lets go of a lock; its file stays, since whoever opened it before would else hold a lock that nobody sees."""
    os.close(lock)


def _locked(path: Path, kind: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
