"""The safetensors files of a model's folder: their layout when written, and the tensors read back without trusting an index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from storage.arrays.packing import byte_view
from storage.errors import FolderRefused, UnsupportedTensor
from storage.format.dtypes import ITEMSIZE, name_of
from storage.objects.spans import Bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TIED = "tied"
"""Key of the file's metadata under which other names of its tensors are kept, as JSON {name: the name that holds the values}."""

_SPELLED = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""torch types -> what the format calls those of them that it has."""

_ALIGNMENT = 8
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_LARGEST_INDEX = 256 << 20


def check_writable_type(name: str, dtype: str) -> None:
    """UnsupportedTensor unless a safetensors file can hold a tensor of this name and type."""
    if dtype not in _SPELLED or name == "__metadata__":
        raise UnsupportedTensor(f"tensor {name!r} of {dtype} has no place in a safetensors file, which holds {', '.join(_SPELLED)}")


def parts(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[Bytes]:
    """A safetensors file as its header and each tensor's own memory, back to back: the library's writer would copy all of it twice.

    The tensors are contiguous and on the CPU; the widest types come first, so that all of them are aligned.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name in order:
        end = at + tensors[name].nbytes
        header[name] = {"dtype": _SPELLED[name_of(tensors[name].dtype)], "shape": list(tensors[name].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8)
    return [head, *(byte_view(tensors[name]) for name in order if tensors[name].numel())]


def shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names with their sizes, in order, in as many files as keep each at `most` bytes (a larger tensor is alone in its own)."""
    files: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if files[-1] and used + size > most:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def shard_names(count: int) -> list[str]:
    """What transformers calls the files of a model."""
    return [SINGLE] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_of(files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> bytes:
    """The index of a model in several files, as transformers reads it."""
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(sizes[name] for name in weight_map)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True).encode()


def is_weights(name: str) -> bool:
    """Whether a file of this name belongs to a model's weights as read and written here."""
    return name == INDEX or _SHARD.fullmatch(name) is not None


def tensors_of(folder: Path, present: Iterable[str], stack: ExitStack) -> dict[str, torch.Tensor]:
    """The tensors of a folder that holds the files `present`, mapped from the disk until `stack` closes; tied names share one.

    FolderRefused if there are no safetensors, or if they and their index contradict each other.
    """
    present = set(present)
    listed = _listed(folder, present)
    found: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for file in [SINGLE] if listed is None else sorted(set(listed.values())):
        try:
            opened = stack.enter_context(safe_open(str(folder / file), framework="pt", device="cpu"))
            names = set(opened.keys())
            wanted = names if listed is None else {name for name, place in listed.items() if place == file}
            if names != wanted:
                raise FolderRefused(f"{folder / file} and {INDEX} disagree on {', '.join(sorted(names ^ wanted)[:3])[:200]}: get the folder again")
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no mapping
            tied |= _tied(opened.metadata(), folder / file)
        except (SafetensorError, OSError) as error:
            raise FolderRefused(f"{folder / file} is no whole safetensors file ({error}): get it again") from error
    for name, tensor in found.items():
        if name_of(tensor.dtype) not in ITEMSIZE:
            raise UnsupportedTensor(f"tensor {name!r} of {folder} is {name_of(tensor.dtype)}, which no store holds")
    return _with_ties(found, tied, folder)


def _listed(folder: Path, present: set[str]) -> dict[str, str] | None:
    """Tensor -> file as the index says, None if one file holds all."""
    if SINGLE in present:
        return None
    if INDEX not in present:
        pickled = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
        if pickled:
            raise FolderRefused(
                f"{folder} has its weights in {pickled[0]}, a pickle, which can run code when it is read: convert it to safetensors where you "
                "trust it, with from_pretrained(...).save_pretrained(...) of transformers"
            )
        raise FolderRefused(f"{folder} has neither {SINGLE} nor {INDEX}: give the folder of a Hugging Face model")
    path = folder / INDEX
    try:
        if path.stat().st_size > _LARGEST_INDEX:
            raise FolderRefused(f"{path} is larger than any index")
        listed = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FolderRefused(f"{path} is no index of safetensors files ({type(error).__name__}: {str(error)[:100]})") from error
    if not isinstance(listed, dict) or not listed:
        raise FolderRefused(f"{path} lists no tensors")
    for file in map(str, listed.values()):
        if _SHARD.fullmatch(file) is None:
            raise FolderRefused(f"{path} names {file[:80]!r}, which is no safetensors file of its folder")
        if file not in present:
            raise FolderRefused(f"{folder} lacks {file}, which {INDEX} names: get the folder again")
    return {str(name): str(file) for name, file in listed.items()}


def _tied(metadata: Mapping[str, str] | None, file: Path) -> dict[str, str]:
    try:
        said = json.loads((metadata or {}).get(TIED, "{}"))
    except (ValueError, RecursionError) as error:
        raise FolderRefused(f"{file} has {TIED!r} metadata that isn't JSON ({str(error)[:100]})") from error
    if not isinstance(said, dict) or not all(isinstance(owner, str) for owner in said.values()):
        raise FolderRefused(f"{file} has {TIED!r} metadata that names no tensors")
    return said


def _with_ties(found: dict[str, torch.Tensor], tied: Mapping[str, str], folder: Path) -> dict[str, torch.Tensor]:
    for name, owner in tied.items():
        if owner not in found or owner in tied:
            raise FolderRefused(f"{folder} says that {name[:80]!r} is tied to {owner[:80]!r}, which it doesn't hold")
        one, other = found.pop(name, None), found[owner]  # (put back behind its owner)
        if one is not None and not (one.dtype == other.dtype and one.shape == other.shape and np.array_equal(byte_view(one), byte_view(other))):
            raise FolderRefused(f"{folder} says that {name[:80]!r} is tied to {owner[:80]!r}, but they differ")
        found[name] = other
    return found
