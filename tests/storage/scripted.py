"""An object store that a test scripts: it dies at a chosen change, calls a hook before each change, and has a clock of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from storage.arrays.packing import pack
from storage.deltas.changes import Base, as_changes
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore

HOUR = 3600.0


class Killed(BaseException):
    """The process ends here, as far as the code under test can tell: nothing that catches errors may catch it."""


@dataclass
class Script:
    """What all stores over one place share: how many changes are `left`, what happens `before` each one, and the time."""

    left: int | None = None
    before: Callable[[str, str], None] | None = None
    now: float | None = None
    times: dict[str, float] = field(default_factory=dict)
    changes: list[tuple[str, str]] = field(default_factory=list)

    def change(self, kind: str, path: str) -> None:
        if self.before is not None:
            self.before(kind, path)
        if self.left is not None:
            if self.left == 0:
                raise Killed
            self.left -= 1
        self.changes.append((kind, path))


class ScriptedStore(ObjectStore):
    """`delete` of a folder is many changes, as on a real store: a kill can come between any two of them."""

    script: Script

    @classmethod
    def over(cls, place: tuple[str, dict[str, Any]], script: Script) -> ScriptedStore:
        store = cls(*place)
        store.script = script
        return store

    def child(self, prefix: str) -> ScriptedStore:
        child = super().child(prefix)
        assert isinstance(child, ScriptedStore)
        child.script = self.script
        return child

    def write(self, path: str, data: Any) -> None:
        self.script.change("write", path)
        super().write(path, data)
        self._stamp(path)

    def create(self, path: str, data: bytes) -> bool:
        self.script.change("create", path)
        made = super().create(path, data)
        if made:
            self._stamp(path)
        return made

    def delete(self, path: str, recursive: bool = False) -> None:
        for one in self.list(path) if recursive else [path]:
            self.script.change("delete", one)
            super().delete(one)

    def infos(self, prefix: str = "") -> Any:
        return [replace(info, modified=self.script.times.get(f"{self.url}/{info.path}", info.modified)) for info in super().infos(prefix)]

    def _stamp(self, path: str) -> None:
        self.script.times[f"{self.url}/{path}"] = time.time() if self.script.now is None else self.script.now


def values(version: Version) -> torch.Tensor:
    """The 600 values that the tests give a version: of any other version, a few differ."""
    found = torch.arange(600, dtype=torch.float32)
    found[version.step % 500] = 1e6 + version.lineage * 1000 + version.step
    return found


def put(weights: WeightStore, version: Version, base: Version | None = None, files: dict[str, bytes] | None = None) -> Version:
    """Publishes `values(version)`, as changes of `base` if one is given."""
    packed = pack({"w": values(version)})
    if base is not None:
        changes = as_changes(packed, Base(base, pack({"w": values(base)}), 1))
        assert changes is not None
        packed = changes
    return weights._versioned.put(version, packed, files=files or {}).version


def whole(weights: WeightStore, version: Version) -> bool:
    """Whether a version comes back as it was published."""
    return np.array_equal(weights.pull(version)["w"].numpy(), values(version).numpy())
