"""Stands for triton, of which SGLang's modules define kernels when they are imported; on a CPU none is launched."""

from __future__ import annotations

from typing import Any

from rollart_stand_in import Holding, stand_in

__version__ = "3.9.0"


class Decorator(Holding):
    """What may be a module, or a decorator with or without arguments, which leaves its function as it is. Not there where its truth is asked."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False


def _make(name: str) -> Any:
    last = name.rpartition(".")[2]
    return type(last, (), {"__init__": lambda self, *_, **__: None}) if last[0].isupper() else Decorator(name, _make)


__getattr__ = stand_in("triton", _make, Decorator)


class Config:
    """A kernel's tuning, which SGLang reads back."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        self.kwargs = kwargs or {}
        self.__dict__.update(options)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


import triton.language as language  # noqa: E402 (found by what stands above)


class _Constexpr:
    def __init__(self, value: Any = None) -> None:
        self.value = value


language.constexpr = _Constexpr
