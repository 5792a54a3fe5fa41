"""Modules that hold whatever is asked of them, for packages that SGLang imports on a CPU and does not call there."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Holding", "stand_in"]


class Holding(types.ModuleType):
    """A module whose every public name is there: made by `make` from its full name when it is first asked for, and kept."""

    __path__: Sequence[str] = ()

    def __init__(self, name: str, make: Callable[[str], Any]) -> None:
        super().__init__(name)
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        found = sys.modules[full] if full in sys.modules else self._make(full)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports any module below `package` as one of `kind`, which holds what `make` makes."""

    def __init__(self, package: str, make: Callable[[str], Any], kind: type[Holding]) -> None:
        self._package, self._make, self._kind = package, make, kind

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(f"{self._package}.") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._kind(spec.name, self._make)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: it is made whole."""


def stand_in(package: str, make: Callable[[str], Any], kind: type[Holding] = Holding) -> Callable[[str], Any]:
    """Has `package.*` be there, whatever is imported or taken from it; returns what `package` itself needs as its `__getattr__`."""
    sys.meta_path.append(_Finder(package, make, kind))
    root = kind(package, make)

    def get(name: str) -> Any:
        return getattr(root, name)

    return get
