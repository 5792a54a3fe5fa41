"""Moves bytes between a file and many buffers, at the speed of memory where the file is in it; owns no paths and no names."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from storage.objects.spans import Bytes, Content, Seen, cut, total

_MAPPED_FROM = 1 << 20
"""Reads of less gain nothing from a mapping."""

_WINDOW_BYTES = 4 << 20
"""How much of a file is mapped at once: pages of it count as this process's memory meanwhile."""

_POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ (5.14), for which Python has no name: brings the pages in, and says so where touching one that can't be
read would kill the process."""

_SHOWN_BYTES = 1 << 20
"""How much is copied before it is shown: it is in the processor's cache still, and threads seldom wait for each other."""

_WRITTEN_BYTES = 16 << 20
"""How much is written at once: the kernel keeps a file in pages as large as the writes were, and larger ones are read faster later on."""

_RESERVED_FROM = 1 << 20
"""Files of less gain nothing from having their room reserved."""

_MOST_BUFFERS = 1024
"""What one call of writev takes (IOV_MAX)."""


def fill(descriptor: int, buffers: Sequence[Bytes], start: int, seen: Seen | None = None) -> None:
    """Fills `buffers`, back to back, from byte `start` of an open file, as far as the file goes."""
    end = min(start + total(buffers), os.fstat(descriptor).st_size)
    if end - start >= _MAPPED_FROM and sys.platform == "linux":
        # The kernel copies what it has cached at about half the speed of a process that copies it out of a mapping.
        done = _fill_mapped(descriptor, buffers, start, end, seen)
        buffers = cut(buffers, done, end - start)
        start += done
    for buffer in buffers:
        view = buffer.data
        while len(view):
            count = os.preadv(descriptor, [view], start)
            if not count:
                return
            view = view[count:]
            start += count
        if seen is not None:
            seen([buffer])


def put(descriptor: int, content: Content) -> None:
    """Writes `content` at the beginning of an open file that is empty."""
    if content.size >= _RESERVED_FROM and hasattr(os, "posix_fallocate"):
        # Room that is there already is filled, and brought to the disk, with less work. Where it can't be had, the writing says why.
        with suppress(OSError):
            os.posix_fallocate(descriptor, 0, content.size)
    views: list[memoryview] = []
    count = 0
    for part in content.parts():
        if len(part):
            views.append(part.data)
            count += len(part)
        if count >= _WRITTEN_BYTES or len(views) == _MOST_BUFFERS:
            _write(descriptor, views)
            views, count = [], 0
    _write(descriptor, views)


def _write(descriptor: int, views: list[memoryview]) -> None:
    at = 0
    while at < len(views):
        count = os.writev(descriptor, views[at:])
        while at < len(views) and count >= len(views[at]):
            count -= len(views[at])
            at += 1
        if count:
            views[at] = views[at][count:]


def _fill_mapped(descriptor: int, buffers: Sequence[Bytes], start: int, end: int, seen: Seen | None) -> int:
    """How many bytes were copied: fewer than [start, end) if the file can't be mapped or read so, which reading it then explains."""
    for at in range(start, end, _WINDOW_BYTES):
        until = min(at + _WINDOW_BYTES, end)
        base = at - at % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(descriptor, until - base, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=base)
            mapped.madvise(_POPULATE_READ)
        except OSError:
            return at - start
        source = np.frombuffer(mapped, dtype=np.uint8)[at - base :]
        for shown in range(at, until, _SHOWN_BYTES):
            targets = cut(buffers, shown - start, min(shown + _SHOWN_BYTES, until) - start)
            for target in targets:
                # A copy by numpy's own loop: the C library's takes half as long again for pieces of this size on some processors.
                np.positive(source[: len(target)], out=target)
                source = source[len(target) :]
            if seen is not None:
                seen(targets)
    return end - start
