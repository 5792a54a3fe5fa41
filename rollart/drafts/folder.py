"""A draft head as a folder: `config.json`, and `model.safetensors` with `kept` among its tensors. Owns what is checked when one is read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.drafts.config import HeadConfig
from rollart.drafts.errors import DraftError
from rollart.drafts.head import DraftHead, refuse_wrong_kept

__all__ = ["CONFIG", "WEIGHTS", "config_file", "fitted", "load_head", "read_config", "read_weights", "save_head"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def config_file(config: HeadConfig) -> bytes:
    """The content of config.json."""
    return (json.dumps(config.document(), indent=2) + "\n").encode()


def save_head(head: DraftHead, folder: Path) -> None:
    """Writes both files, in the head's number format; the folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_bytes(config_file(head.config))
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in head.state_dict().items()}, folder / WEIGHTS, {"format": "pt"})


def load_head(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", otherwise: HeadConfig | None = None) -> DraftHead:
    """The head of a folder, of the config `otherwise` where that holds none; DraftError if it holds no head, or weights that don't fit."""
    config = otherwise if otherwise is not None and not (folder / CONFIG).exists() else read_config(folder)
    head = _empty(config)
    head.load_state_dict(read_weights(folder, config, dtype, device), assign=True)
    return head


def read_config(folder: Path) -> HeadConfig:
    """What config.json says; DraftError if there is none or it is no head's."""
    try:
        document = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise DraftError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise DraftError(f"{folder / CONFIG} is no draft head's: it holds no object")
    return HeadConfig.from_document(document)


def read_weights(folder: Path, config: HeadConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors in model.safetensors, in that format and on that device; DraftError unless they are a head's of that config."""
    try:
        return fitted(load_file(folder / WEIGHTS), config, dtype, device)
    except (SafetensorError, OSError) as error:
        raise DraftError(f"{folder / WEIGHTS} cannot be read: {error}") from error


def fitted(tensors: dict[str, Tensor], config: HeadConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Copies of the weights and `kept` of a head of that config, in that format and on that device.

    DraftError if one is missing, unknown, of another shape or kind, or not finite, or if `kept` isn't ascending.
    """
    wanted = _empty(config).state_dict()
    for name in sorted(wanted.keys() ^ tensors.keys()):
        raise DraftError(f"the draft head's weights {'lack' if name in wanted else 'hold an unknown'} {name}")
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise DraftError(f"{name} has shape {tuple(tensor.shape)}; a draft head of this config has {tuple(wanted[name].shape)}")
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise DraftError(f"{name} is of {tensor.dtype}; a draft head's is of {wanted[name].dtype}")
        made[name] = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        if not bool(torch.isfinite(made[name]).all()):
            raise DraftError(f"{name} holds values that are not finite in {made[name].dtype}")
    refuse_wrong_kept(made["kept"], config)
    return made


def _empty(config: HeadConfig) -> DraftHead:
    """A head without memory for its weights."""
    with torch.device("meta"):
        return DraftHead(config, torch.arange(config.kept, device="cpu"))
