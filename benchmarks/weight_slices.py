"""How many stored bytes it takes to pull parts of tensors, as ranks that share a model do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.weight_states import make
from storage.objects.spans import Bytes, Seen, total
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore

RANKS = 4


class CountingStore(ObjectStore):
    """An object store that counts the bytes of chunks that are read from it."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, **how: Any) -> None:
        super().__init__(url, storage_options, **how)
        self.counted = [0]

    def child(self, prefix: str) -> CountingStore:
        made = super().child(prefix)
        if not isinstance(made, CountingStore):
            raise TypeError(f"{type(made).__name__} doesn't count")
        made.counted = self.counted
        return made

    def read_into(self, path: str, buffer: Bytes | Sequence[Bytes], start: int = 0, seen: Seen | None = None) -> int:
        self.counted[0] += len(buffer) if isinstance(buffer, np.ndarray) else total(buffer)
        return super().read_into(path, buffer, start, seen)


def slice_figures(url: str, size: str) -> dict[str, float]:
    """Bytes read over bytes wanted by one of `RANKS` that takes its rows of every matrix; and, for one that takes its columns, bytes
    read over the rows' bytes."""
    state = {name: tensor for name, tensor in make(size).items() if tensor.dim() == 2}
    WeightStore(url).publish(state, version=Version(0, 0), background=False)
    rows = {name: _part(tensor.shape[0]) for name, tensor in state.items()}
    columns = {name: (slice(None), _part(tensor.shape[1])) for name, tensor in state.items()}
    found = {}
    for figure, slices, wanted in (
        ("slice_bytes_ratio", rows, sum(state[name][part].nbytes for name, part in rows.items())),
        ("column_slice_bytes_ratio", columns, sum(tensor.nbytes for tensor in state.values())),
    ):
        counting = CountingStore(url)
        WeightStore.over(counting).pull(Version(0, 0), slices=slices)
        found[figure] = counting.counted[0] / wanted
    return found


def _part(length: int) -> slice:
    return slice(length // RANKS, 2 * length // RANKS)
