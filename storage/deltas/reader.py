"""Reads arrays that are stored as changes; owns applying them to the base's values, and believes neither without the checksums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from storage.arrays.chunks import ArrayReader
from storage.errors import Damaged
from storage.format import codec
from storage.format.checksums import crc32c
from storage.format.codec import ChangeRefused
from storage.format.delta_index import segments_per_chunk
from storage.format.dtypes import ITEMSIZE, WORD
from storage.format.index import DeltaEntry
from storage.format.numbers import Numbers, numbers_of
from storage.objects.spans import Bytes, cut, spread, total
from storage.version import Version


class Changes:
    """What `version` has changed in array `name`; `stream` gives it, None if that is nothing."""

    def __init__(self, name: str, entry: DeltaEntry, stream: ArrayReader | None, version: Version, url: str) -> None:
        self.entry = entry
        self.version = version
        self._name, self._stream, self._url = name, stream, url

    @property
    def segments(self) -> int:
        """Segments of a chunk; the last chunk may have fewer."""
        return segments_per_chunk(self.entry)

    def read(self, first: int, last: int, tensor: str) -> list[Bytes]:
        """The encoded changes of segments [first, last), counted through the array. Damaged, naming `tensor`."""
        offsets = self._offsets[first : last + 1] - self._offsets[first]
        start, found = int(self._offsets[first]), np.empty(int(offsets[-1]), dtype=np.uint8)
        done = 0
        while self._stream is not None and done < len(found):
            chunk, inside = divmod(start + done, self._stream.chunk_bytes)
            count = min(self._stream.chunk_bytes - inside, len(found) - done)
            self._stream.read(chunk, inside, [found[done : done + count]], tensor)
            done += count
        return [found[offsets[i] : offsets[i + 1]] for i in range(last - first)]

    def apply(self, segment: int, values: Bytes, change: Bytes, tensor: str) -> None:
        """Turns the base's values of a segment, in place, into this version's.

        Damaged, naming `tensor`, if that doesn't give what was written: then the change isn't what it was, or the base isn't.
        """
        try:
            codec.apply(values, change, WORD[self.entry.dtype])
        except ChangeRefused as error:
            raise self._damaged(segment, f"can't be applied: {error}", tensor) from error
        if crc32c([values]) != self._sums[segment]:
            raise self._damaged(segment, "doesn't give the values that were written, so it or what it is applied to has changed", tensor)

    def any(self, number: int) -> bool:
        """Whether anything in a chunk differs from the base's."""
        return bool(self._chunk_offset(number + 1) > self._chunk_offset(number))

    def check_sizes(self, numbers: Iterable[int], tensor: str) -> None:
        """See ArrayReader: of the chunks that hold the changes."""
        if self._stream is not None:
            size = self._stream.chunk_bytes
            chunks = (range(self._chunk_offset(n) // size, -(-self._chunk_offset(n + 1) // size)) for n in numbers)
            self._stream.check_sizes(dict.fromkeys(chunk for found in chunks for chunk in found), tensor)

    @cached_property
    def _offsets(self) -> npt.NDArray[np.int64]:
        """Where each segment's change starts in the stream, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(numbers_of(self.entry.sizes), dtype=np.int64)])

    @cached_property
    def _sums(self) -> Numbers:
        return numbers_of(self.entry.crc32c)

    def _chunk_offset(self, number: int) -> int:
        return int(self._offsets[min(number * self.segments, len(self._offsets) - 1)])

    def _damaged(self, segment: int, reason: str, tensor: str) -> Damaged:
        what = f"the change of segment {segment} of array {self._name}"
        return Damaged(what=what, reason=reason, url=self._url, version=self.version, tensor=tensor)


class DeltaReader:
    """An array that is `base`'s after `links`, one or more, applied in that order and in equal segments. See ArrayReader."""

    def __init__(self, base: ArrayReader, links: Sequence[Changes]) -> None:
        self.base = base
        self.links = links
        self.entry = links[-1].entry

    @property
    def chunk_bytes(self) -> int:
        return self.entry.chunk_bytes

    @property
    def block_bytes(self) -> int:
        return self.entry.segment

    def read(self, number: int, start: int, buffers: Sequence[Bytes], tensor: str) -> None:
        # Whole segments are read, what was asked for straight to its place.
        values = min(self.entry.chunk, self.entry.length - number * self.entry.chunk) * ITEMSIZE[self.entry.dtype]
        segment, end = self.entry.segment, start + total(buffers)
        first, last = start // segment * segment, min(-(-end // segment) * segment, values)
        spans = [np.empty(start - first, dtype=np.uint8), *cut(buffers, 0, values - start), np.empty(max(last - end, 0), dtype=np.uint8)]
        spans = [span for span in spans if len(span)]
        if last > first:
            self.base.read(number, first, spans, tensor)
            apply_links(self.links, number, first // segment, spans, tensor)
        for padding in cut(buffers, max(values - start, 0), total(buffers)):
            padding[:] = 0

    def check_sizes(self, numbers: Iterable[int], tensor: str) -> None:
        wanted = list(numbers)
        self.base.check_sizes(wanted, tensor)
        for link in self.links:
            link.check_sizes(wanted, tensor)


def apply_links(links: Sequence[Changes], number: int, first: int, spans: Sequence[Bytes], tensor: str) -> None:
    """Applies `links`, in place, to whole segments of chunk `number` from its `first` on, which back to back are `spans`. Damaged."""
    segment, size = links[0].entry.segment, total(spans)
    count, at = -(-size // segment), number * links[0].segments + first
    changes = [link.read(at, at + count, tensor) for link in links]
    # (One place for all segments that several spans share: memory that the system has to clear each time costs more than the rest.)
    scratch = np.empty(min(segment, size), dtype=np.uint8)
    for i in range(count):
        parts = cut(spans, i * segment, (i + 1) * segment)
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, out=scratch[: total(parts)])
        for link, change in zip(links, changes, strict=True):
            link.apply(at + i, values, change[i], tensor)
        if len(parts) > 1:
            spread(values, parts)
