"""Weights as an SGLang server on the same host takes them without a file: in shared memory, with a description that travels by HTTP."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["described", "shared_weights"]

_SHARING = threading.Lock()


def shared_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of the folder's safetensors files, by name, in shared memory: keep them until the server has answered."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor.share_memory_() for name, tensor in load_file(file).items()}
    return found


def described(ranks: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """What `serialized_named_tensors` of `/update_weights_from_tensor` wants: for each rank of the server where its tensors are.

    Shared memory goes by name: a server is no child of this process, and where files are handed on instead, as torch does unless it is told,
    one that is sent them ends.
    """
    with _SHARING:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            return [_pickled(list(tensors.items())) for tensors in ranks]
        finally:
            torch.multiprocessing.set_sharing_strategy(before)


def _pickled(named: list[tuple[str, Tensor]]) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()
