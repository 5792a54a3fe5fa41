"""Reads arrays that are stored as changes; owns applying them to the base's values, and believes neither without the checksums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from storage import delta_codec
from storage.checksums import crc32c
from storage.chunks import ArrayReader
from storage.delta_codec import ChangeRefused
from storage.delta_index import Numbers, numbers_of, segments_per_chunk
from storage.dtypes import ITEMSIZE, WORD
from storage.errors import Damaged
from storage.index import DeltaEntry
from storage.spans import Bytes, cut, total
from storage.version import Version


class DeltaReader:
    """Array `name` of `version`, stored as changes of `base`'s array of that name (None: to be applied by hand). See ArrayReader.

    `stream` gives the encoded changes, None if there are none.
    """

    def __init__(self, name: str, entry: DeltaEntry, stream: ArrayReader | None, base: ArrayReader | None, version: Version, url: str) -> None:
        self.entry = entry
        self._name, self._stream, self._base, self._version, self._url = name, stream, base, version, url

    @property
    def chunk_bytes(self) -> int:
        return self.entry.chunk_bytes

    @property
    def block_bytes(self) -> int:
        return self.entry.segment

    def read(self, number: int, start: int, buffers: Sequence[Bytes], tensor: str) -> None:
        if self._base is None:
            raise ValueError(f"array {self._name!r} has no base to read")
        # Whole segments are read: straight to their place where one of the buffers has room for all of a segment.
        values, segment = self._value_bytes(number), self.entry.segment
        end = start + total(buffers)
        first, last = start // segment * segment, min(-(-end // segment) * segment, values)
        spans = [np.empty(start - first, dtype=np.uint8), *cut(buffers, 0, values - start), np.empty(max(last - end, 0), dtype=np.uint8)]
        spans = [span for span in spans if len(span)]
        pieces = [cut(spans, at, at + segment) for at in range(0, last - first, segment)]
        segments = [parts[0] if len(parts) == 1 else np.empty(total(parts), dtype=np.uint8) for parts in pieces]
        if segments:
            self._base.read(number, first, segments, tensor)
            self.apply(number, first // segment, segments, tensor)
        for parts, whole in zip(pieces, segments, strict=True):
            if len(parts) > 1:
                spread(whole, parts)
        for padding in cut(buffers, max(values - start, 0), total(buffers)):
            padding[:] = 0

    def apply(self, number: int, first: int, segments: Sequence[Bytes], tensor: str) -> None:
        """Turns the base's values into this version's, in place, in `segments`, which are those of chunk `number` from `first` on.

        Damaged, naming `tensor`, if that doesn't give what was written: then the changes aren't what they were, or the base isn't.
        """
        at = number * segments_per_chunk(self.entry) + first
        changes = self._changes(at, at + len(segments), tensor)
        sums = self._sums[at : at + len(segments)]
        word = WORD[self.entry.dtype]
        for i, values in enumerate(segments):
            start, end = self._offsets[at + i] - self._offsets[at], self._offsets[at + i + 1] - self._offsets[at]
            try:
                delta_codec.apply(values, changes[start:end], word)
            except ChangeRefused as error:
                raise self._damaged(at + i, f"can't be applied: {error}", tensor) from error
            if crc32c([values]) != sums[i]:
                raise self._damaged(at + i, "doesn't give the values that were written, so it or what it is applied to has changed", tensor)

    def changed(self, number: int) -> bool:
        """Whether anything in a chunk differs from the base's."""
        count = segments_per_chunk(self.entry)
        last = min((number + 1) * count, len(self._offsets) - 1)
        return bool(self._offsets[last] > self._offsets[number * count])

    def check_sizes(self, numbers: Iterable[int], tensor: str) -> None:
        wanted = list(numbers)
        if self._base is not None:
            self._base.check_sizes(wanted, tensor)
        if self._stream is not None:
            count, size = segments_per_chunk(self.entry), self._stream.chunk_bytes
            chunks: dict[int, None] = {}
            for number in wanted:
                start, end = self._offsets[number * count], self._offsets[min((number + 1) * count, len(self._offsets) - 1)]
                chunks |= dict.fromkeys(range(start // size, -(-end // size)))
            self._stream.check_sizes(chunks, tensor)

    @cached_property
    def _offsets(self) -> npt.NDArray[np.int64]:
        """Where each segment's change starts in the stream, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(numbers_of(self.entry.sizes), dtype=np.int64)])

    @cached_property
    def _sums(self) -> Numbers:
        return numbers_of(self.entry.crc32c)

    def _value_bytes(self, number: int) -> int:
        """Bytes of a chunk's values without padding."""
        return min(self.entry.chunk, self.entry.length - number * self.entry.chunk) * ITEMSIZE[self.entry.dtype]

    def _changes(self, start: int, end: int, tensor: str) -> Bytes:
        """The encoded changes of segments [start, end), back to back."""
        at, until = int(self._offsets[start]), int(self._offsets[end])
        found = np.empty(until - at, dtype=np.uint8)
        if self._stream is None:
            return found
        done = 0
        while done < len(found):
            chunk, inside = divmod(at + done, self._stream.chunk_bytes)
            count = min(self._stream.chunk_bytes - inside, len(found) - done)
            self._stream.read(chunk, inside, [found[done : done + count]], tensor)
            done += count
        return found

    def _damaged(self, segment: int, reason: str, tensor: str) -> Damaged:
        what = f"the change of segment {segment} of array {self._name}"
        return Damaged(what=what, reason=reason, url=self._url, version=self._version, tensor=tensor)


def spread(whole: Bytes, parts: Sequence[Bytes]) -> None:
    """Copies a run of bytes to the buffers that it belongs in, back to back."""
    at = 0
    for part in parts:
        part[:] = whole[at : at + len(part)]
        at += len(part)
