"""Byte buffers that stand for one run of bytes, back to back; owns cutting, counting and filling them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

Seen = Callable[[Sequence[Bytes]], None]
"""Is shown what was read, part by part and in order, while it is in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Content:
    """What an object is to hold: `size` bytes, in parts back to back. They are made as they are written, each time anew, so that work
    on them finds them in the processor's cache."""

    size: int
    parts: Callable[[], Iterable[Bytes]]

    @classmethod
    def of(cls, data: bytes | Bytes | Sequence[Bytes] | Content) -> Content:
        """`data` as the content of an object; a sequence stands for its parts."""
        if isinstance(data, Content):
            return data
        if isinstance(data, bytes):
            data = np.frombuffer(data, dtype=np.uint8)
        parts = [data] if isinstance(data, np.ndarray) else data
        return cls(total(parts), lambda: parts)


def total(buffers: Sequence[Bytes]) -> int:
    """How many bytes `buffers` have together."""
    return sum(map(len, buffers))


def spread(values: Bytes, buffers: Sequence[Bytes]) -> None:
    """Copies `values` into `buffers`, back to back, as far as they go; what is left of the buffers stays as it is."""
    at = 0
    for buffer in buffers:
        part = values[at : at + len(buffer)]
        buffer[: len(part)] = part
        at += len(part)


def cut(buffers: Sequence[Bytes], start: int, end: int) -> list[Bytes]:
    """Bytes [start, end) of the run, as views of the buffers that they lie in."""
    found = []
    at = 0
    for buffer in buffers:
        if at >= end:
            break
        if at + len(buffer) > start:
            found.append(buffer[max(start - at, 0) : end - at])
        at += len(buffer)
    return found


def joined(buffers: Sequence[Bytes]) -> Bytes:
    """The run as one buffer: a view if there is only one to begin with, else a copy."""
    if len(buffers) == 1:
        return buffers[0]
    return np.concatenate(buffers) if buffers else np.empty(0, dtype=np.uint8)
