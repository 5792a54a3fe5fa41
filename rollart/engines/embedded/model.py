"""The policy that an engine serves: loads it, runs it on packed steps, exchanges its weights. Knows nothing of requests or HTTP."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.engines.embedded.attention import ATTENTION, PackedStep

__all__ = ["PolicyModel", "WeightsError"]

_QUANTISED = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
"""Floating-point types of a single byte, which stand for weights only together with a scale."""


class WeightsError(ValueError):
    """A folder holds no weights, unreadable ones, or those of another model; the served weights are untouched."""


class PolicyModel:
    """A causal language model with `config.json` in `folder`; weights too where they stand there, else random until `swap`.

    `loaded` says whether the weights came from anywhere but the random initialisation.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.dtype = dtype
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.loaded = any(folder.glob("*.safetensors"))
        if self.loaded:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        self._model = model.to(device).eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.vocabulary = int(self.config.vocab_size)
        eos = model.generation_config.eos_token_id if model.generation_config.eos_token_id is not None else self.config.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or [])

    def logits(self, step: PackedStep) -> Tensor:
        """The logits [S, V] of the tokens in `step.sampled`, on the model's device; call it in inference mode."""
        out = self._model(input_ids=step.ids, position_ids=step.positions, use_cache=False, logits_to_keep=step.sampled, step=step, return_dict=True)
        return out.logits[0]

    def logits_and_hidden(self, step: PackedStep) -> tuple[Tensor, Tensor]:
        """`logits`, and with them the last hidden states [N, H] of all tokens: after the final norm, what the LM head reads."""
        found: list[Tensor] = []
        # What a model does to its logits beside its LM head is its own affair; so it runs as ever, and is overheard.
        hook = self._model.base_model.register_forward_hook(lambda _module, _arguments, out: found.append(out.last_hidden_state))
        try:
            logits = self.logits(step)
        finally:
            hook.remove()
        return logits, found[0][0]

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens."""
        embedded: Tensor = self._model.get_input_embeddings()(ids)
        return embedded

    def stage(self, folder: Path) -> dict[str, Tensor]:
        """Reads the weights in `folder` into memory, in this model's names, shapes, type and device; safe beside a running step.

        WeightsError if there are none, one is missing, one is unknown, a shape or the kind of number differs, or values are not finite in
        the model's type.
        """
        try:
            files = sorted(folder.glob("*.safetensors"))
        except OSError as error:
            raise WeightsError(f"{folder} cannot be listed: {error.strerror}") from error
        if not files:
            raise WeightsError(f"{folder} holds no model.safetensors")
        wanted, aliases = self._wanted()
        staged: dict[str, Tensor] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt", device="cpu") as reader:
                    for name in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                        tensor, name = reader.get_tensor(name), aliases.get(name, name)
                        if name not in wanted:
                            raise WeightsError(f"{file.name} holds {name}, which {type(self._model).__name__} has not")
                        if tensor.shape != wanted[name].shape:
                            raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(wanted[name].shape)}")
                        if tensor.is_floating_point() != wanted[name].is_floating_point() or tensor.is_complex() or tensor.dtype in _QUANTISED:
                            # Codes of a quantised format would pass for weights without the scales that give them their meaning.
                            raise WeightsError(f"{name} is of {tensor.dtype}, the model wants {wanted[name].dtype}")
                        # A copy: what the reader returns may be a view of the file, and the folder goes away.
                        staged[name] = tensor.to(device=self.device, dtype=wanted[name].dtype, copy=True)
                        if not bool(torch.isfinite(staged[name]).all()):
                            # NaN would outlive these weights in the KV cache: even a masked key takes part as 0 * value.
                            raise WeightsError(f"{name} holds values that are not finite in {wanted[name].dtype}")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file} cannot be read: {error}") from error
        missing = sorted(set(wanted) - set(staged))
        if missing:
            raise WeightsError(f"{folder} lacks {len(missing)} weights, among them {missing[0]}")
        return staged

    def _wanted(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What a folder must hold, by name; and for tied weights, which may stand under any of their names, the name wanted."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        wanted: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            first = names.get(id(tensor), name)
            if first == name:
                wanted[name] = tensor
            else:
                aliases[name] = first
        return wanted, aliases

    def swap(self, staged: dict[str, Tensor]) -> None:
        """Makes staged weights the served ones by exchanging storage, in microseconds; call it between two steps only."""
        for name, parameter in self._model.named_parameters():
            parameter.data = staged.pop(name)
        if staged:
            buffers = dict(self._model.named_buffers())
            for name, tensor in staged.items():
                buffers[name].copy_(tensor)
        self.loaded = True
