"""Which torch types are stored, and as which Zarr type; owns that table only."""

from __future__ import annotations

import torch

ZARR_OF = {
    "float64": "float64", "float32": "float32", "float16": "float16",
    "int64": "int64", "int32": "int32", "int16": "int16", "int8": "int8",
    "uint64": "uint64", "uint32": "uint32", "uint16": "uint16", "uint8": "uint8",
    "bool": "bool", "complex64": "complex64", "complex128": "complex128",
    # Zarr's core has no types for these, so their bits are stored; the index and the array's attributes say what they are.
    "bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e4m3fnuz": "uint8", "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}  # fmt: skip
"""Names of torch types -> names of the Zarr v3 types that hold their bits, little-endian."""

TORCH_OF: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ZARR_OF}
ITEMSIZE = {name: dtype.itemsize for name, dtype in TORCH_OF.items()}

WORD = {name: dtype.itemsize // (2 if dtype.is_complex else 1) for name, dtype in TORCH_OF.items()}
"""Bytes of the numbers that a type's values are made of: two in a complex one."""


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32; the name says nothing on whether it can be stored."""
    return str(dtype).removeprefix("torch.")
