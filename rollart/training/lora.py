"""Low-rank adapters through the peft library: trained in place of the weights, and carried on their own or merged into these.

LoRA, Hu et al. 2021 (arXiv 2106.09685): W + (alpha / rank) B A, with W frozen. peft is imported only where adapters are wanted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollart.training.errors import StateError
from rollart.training.settings import LoraSettings
from rollart.training.state import own_tensors
from storage.models.adapters import CONFIG_FILE, PREFIX, Adapter, merged_weight

__all__ = ["adapter_config", "adapters", "add_adapters", "base", "described", "load_adapters", "load_base", "merged"]

_ADAPTER = "default"
_BASE = ".base_layer."


def add_adapters(model: nn.Module, settings: LoraSettings, seed: int) -> nn.Module:
    """Puts an adapter that changes nothing yet beside each linear layer that the settings name, in place, and freezes everything else.

    StateError if peft is not installed, no layer has such a name, or one that has is not linear or shares its weights with another layer.
    """
    peft = _peft()
    targets: Any = "all-linear" if settings.targets is None else list(settings.targets)
    config = peft.LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise StateError(f"training.model.lora.targets: {targets} fits no layer of {type(model).__name__} ({error})") from error
    own = own_tensors(model)
    for name, module in _layers(model):
        if _ADAPTER not in module.lora_A:
            raise StateError(f"training.model.lora.targets: {name} of {type(model).__name__} is no linear layer; leave it out")
        if f"{name}{_BASE}weight" not in own:
            raise StateError(f"training.model.lora.targets: {name} of {type(model).__name__} shares its weights with another layer; leave it out")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model.eval()


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the adapters' tensors, under the names by which peft saves them."""
    return {name: value.detach().clone() for name, value in _own_adapters(model).items()}


def load_adapters(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Takes over what `adapters` gave; StateError, before anything changes, if they are another model's."""
    own = _own_adapters(model)
    if set(own) != set(values) or any(own[name].shape != value.shape for name, value in values.items()):
        wrong = sorted(set(own) ^ set(values)) or [name for name, value in values.items() if own[name].shape != value.shape]
        raise StateError(f"the adapters are another model's or of another rank: {wrong[:3]}")
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def base(model: nn.Module) -> dict[str, Tensor]:
    """The weights below the adapters (not copies), under the names that they have without any; tied ones once."""
    return {_plain(name): value.detach() for name, value in own_tensors(model).items() if "lora_" not in name}


def merged(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights with the adapters added in, under the names that they have without any; tied ones once."""
    config = _config(model)
    scale, transposed = config["lora_alpha"] / config["r"], config["fan_in_fan_out"]
    found = {name: value.clone() for name, value in base(model).items()}
    for name, module in _layers(model):
        a, b = module.lora_A[_ADAPTER].weight.detach(), module.lora_B[_ADAPTER].weight.detach()
        found[f"{name}.weight"] = merged_weight(found[f"{name}.weight"], a, b, scale, transposed=transposed)
    return found


def described(model: nn.Module, digest: str) -> Adapter:
    """What a version of the adapters says of itself; `digest` is that of its base."""
    config = _config(model)
    return Adapter(config["r"], float(config["lora_alpha"]), config["target_modules"], config["fan_in_fan_out"], digest)


def adapter_config(model: nn.Module) -> bytes:
    """peft's own file on the adapters, the same for the same adapters whichever process writes it."""
    return json.dumps(_config(model), indent=2, sort_keys=True).encode()


def _config(model: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rollart-adapter-") as scratch:
        model.peft_config[_ADAPTER].save_pretrained(scratch)
        said: dict[str, Any] = json.loads((Path(scratch) / CONFIG_FILE).read_bytes())
    return {**said, "inference_mode": True, "target_modules": sorted(said["target_modules"])}


def _own_adapters(model: nn.Module) -> dict[str, Tensor]:
    return {f"{PREFIX}{name}": value for name, value in _peft().get_peft_model_state_dict(model, adapter_name=_ADAPTER).items()}


def load_base(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Takes whole weights over and resets the adapters to change nothing; StateError, before anything changes, if they do not fit."""
    own = base(model)
    if set(own) != set(values):
        raise StateError(f"the weights are another model's: {sorted(set(own) ^ set(values))[:3]} are missing or too many")
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise StateError(f"weight {name} has shape {tuple(value.shape)}, the model's has {tuple(own[name].shape)}")
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)
        for _, module in _layers(model):
            module.lora_B[_ADAPTER].weight.zero_()


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]


def _plain(name: str) -> str:
    return name.replace(_BASE, ".")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise StateError("training.model.lora needs peft: pip install 'rollart[lora]'") from error
    return peft
