"""A version's model.safetensors that is written in place: made with its header, then filled through tensors over the mapped file.

So a download goes straight to where engines load it from, without the state in memory a second time. Knows no store and no cache.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from storage.format.commit import Commit
from storage.format.dtypes import TORCH_OF
from storage.models.safetensors_files import check_writable_type, parts

__all__ = ["create", "copy_if_alike", "mapped"]

_LENGTH_BYTES = 8
"""A safetensors file starts with its header's length, a little-endian integer; then comes the header, in JSON, then the values."""


def create(path: Path, commit: Commit) -> None:
    """Makes the file for the tensors of `commit`, tied ones once under their first name, with space for the values, which are zeros.

    OSError if there is no room for it, UnsupportedTensor if the format has no place for a tensor.
    """
    head, size = _layout(commit)
    with open(path, "xb") as file:
        # Taken now, since a page of a mapped file that finds no room later kills the process instead of raising.
        _reserve(file.fileno(), size, path)
        file.write(head)


def copy_if_alike(source: Path, path: Path, commit: Commit) -> bool:
    """Makes the file as a copy of `source`, values included, if that has the same tensors as `commit`; whether it did."""
    head, size = _layout(commit)
    with open(source, "rb") as file:
        if file.read(len(head)) != head or os.fstat(file.fileno()).st_size != size:
            return False
    shutil.copyfile(source, path)
    return True


def mapped(path: Path, commit: Commit) -> dict[str, Tensor]:
    """The tensors of a file made for `commit`, by name, in its own memory: what is written to them is in the file. Without empty ones."""
    with open(path, "r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    start = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES].tobytes(), "little")
    header = json.loads(memory[_LENGTH_BYTES:start].tobytes())
    found = {}
    for name, entry in commit.tensors.items():
        if entry.alias_of is None and entry.numel:
            first, last = header[name]["data_offsets"]
            found[name] = torch.from_numpy(memory[start + first : start + last]).view(TORCH_OF[entry.dtype]).view(entry.shape)
    return found


def _layout(commit: Commit) -> tuple[bytes, int]:
    """The bytes before the values, and the size of the whole file."""
    empty: dict[str, Tensor] = {}
    for name, entry in commit.tensors.items():
        if entry.alias_of is None:
            check_writable_type(name, entry.dtype)
            empty[name] = torch.empty(entry.shape, dtype=TORCH_OF[entry.dtype])  # never touched, so it takes no memory
    head, *values = parts(empty, {})
    return head.tobytes(), len(head) + sum(map(len, values))


def _reserve(descriptor: int, size: int, path: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        said = f"no room for a version of {size} bytes ({error.strerror}); free some memory"
        raise OSError(error.errno, said, str(path)) from error
