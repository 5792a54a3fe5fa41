"""The folder that an adapter comes to an engine in, which holds its base: the adapter's own tensors, what it is, and a link to the base.

    adapter.json                  the `Adapter`
    adapter_model.safetensors     its tensors, named as peft saves them
    base/model.safetensors        the whole weights of its base, for an engine that hasn't them yet

Merges nothing and fetches nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from storage.models.adapters import Adapter

__all__ = ["BASE_FOLDER", "holds_adapter", "read_adapter", "write_adapter"]

BASE_FOLDER = "base"
_SAID, _TENSORS, _WEIGHTS = "adapter.json", "adapter_model.safetensors", "model.safetensors"


def holds_adapter(folder: Path) -> bool:
    """Whether the folder is of this form."""
    try:
        return (folder / _SAID).is_file()
    except OSError:  # a path that no file system takes; who lists it for whole weights says so
        return False


def write_adapter(folder: Path, adapter: Adapter, tensors: Mapping[str, Tensor], base: Path) -> None:
    """Makes the folder; `base` is the base's file, on the same file system: no byte of it is copied. OSError."""
    (folder / BASE_FOLDER).mkdir(parents=True)
    os.link(base, folder / BASE_FOLDER / _WEIGHTS)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / _TENSORS)
    (folder / _SAID).write_text(json.dumps(asdict(adapter)))


def read_adapter(folder: Path) -> tuple[Adapter, dict[str, Tensor], int]:
    """The adapter, its tensors, and how many bytes these took to read. OSError, SafetensorError, or ValueError if it makes no sense."""
    import pydantic  # here, since an engine that is given whole weights needs neither this nor the store

    from storage.models.adapters import Adapter

    adapter = pydantic.TypeAdapter(Adapter).validate_json((folder / _SAID).read_bytes())
    return adapter, load_file(folder / _TENSORS), (folder / _TENSORS).stat().st_size
