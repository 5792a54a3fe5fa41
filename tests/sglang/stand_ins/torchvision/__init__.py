"""Stands for torchvision, which transformers and SGLang import for images; no text model calls it."""

from __future__ import annotations

from typing import Any

from rollart_stand_in import stand_in

__version__ = "0.28.0"
NAMES = ("BICUBIC", "BILINEAR", "NEAREST", "LANCZOS", "NEAREST_EXACT", "BOX", "HAMMING", "RGB", "GRAY", "UNCHANGED")


class Unused:
    """Whatever is asked of it, it is another one of it; it refuses to be called."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Unused:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("this torchvision is a stand-in without any function")


def _make(name: str) -> Any:
    last = name.rpartition(".")[2]
    return type(last, (Unused,), {n: n.lower() for n in NAMES}) if last[0].isupper() else Unused()


_held = stand_in("torchvision", _make)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    import importlib

    return importlib.import_module(f"torchvision.{name}")
