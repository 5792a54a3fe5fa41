"""Reads a folder of weights into memory and checks them against what a model wants; owns the refusals, knows nothing of how weights are served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

__all__ = ["WeightsError", "read_weights", "wanted_weights"]

_QUANTISED = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
"""Floating-point types of a single byte, which stand for weights only together with a scale."""


class WeightsError(ValueError):
    """A folder holds no weights, unreadable ones, or those of another model; the served weights are untouched."""


def wanted_weights(model: torch.nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a folder must hold for `model`, by name, on the meta device; and the wanted name of tied weights, which may stand under any of theirs."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.get(id(tensor), name)
        if first == name:
            wanted[name] = torch.empty_like(tensor, device="meta", requires_grad=False)
        else:
            aliases[name] = first
    return wanted, aliases


def read_weights(folder: Path, wanted: Mapping[str, Tensor], aliases: Mapping[str, str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each wanted weight in `folder`, by its wanted name, on `device` in its wanted type, one in memory at a time.

    WeightsError, perhaps after some, if there are none, one is missing, one is unknown, a shape or the kind of number differs, or values are
    not finite in the wanted type.
    """
    try:
        files = sorted(folder.glob("*.safetensors"))
    except OSError as error:
        raise WeightsError(f"{folder} cannot be listed: {error.strerror}") from error
    if not files:
        raise WeightsError(f"{folder} holds no model.safetensors")
    missing = set(wanted)
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for stored in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                    tensor, name = reader.get_tensor(stored), aliases.get(stored, stored)
                    if name not in wanted:
                        raise WeightsError(f"{file.name} holds {name}, which the model has not")
                    if tensor.shape != wanted[name].shape:
                        raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(wanted[name].shape)}")
                    if tensor.is_floating_point() != wanted[name].is_floating_point() or tensor.is_complex() or tensor.dtype in _QUANTISED:
                        # Codes of a quantised format would pass for weights without the scales that give them their meaning.
                        raise WeightsError(f"{name} is of {tensor.dtype}, the model wants {wanted[name].dtype}")
                    # A copy: what the reader returns may be a view of the file, and the folder goes away.
                    read = tensor.to(device=device, dtype=wanted[name].dtype, copy=True)
                    if not bool(torch.isfinite(read).all()):
                        # NaN would outlive these weights in the KV cache: even a masked key takes part as 0 * value.
                        raise WeightsError(f"{name} holds values that are not finite in {wanted[name].dtype}")
                    missing.discard(name)
                    yield name, read
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read: {error}") from error
    if missing:
        raise WeightsError(f"{folder} lacks {len(missing)} weights, among them {min(missing)}")
