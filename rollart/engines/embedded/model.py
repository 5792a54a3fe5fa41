"""The policy that an engine serves: loads it, runs it on packed steps, exchanges its weights. Knows nothing of requests or HTTP."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.engines.embedded.adapted import WeightSource
from rollart.engines.embedded.attention import ATTENTION, PackedStep
from rollart.engines.embedded.decoder import Decoder
from rollart.engines.embedded.weights import WeightsError, wanted_weights

__all__ = ["PolicyModel", "WeightsError"]


class PolicyModel:
    """A causal language model with `config.json` in `folder`; weights too where they stand there, else random until `swap`.

    `loaded` says whether the weights came from anywhere but the random initialisation. Models of the common families run through the engine's own
    `Decoder`, all others through the transformers module.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder = folder
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

        self._source = WeightSource(*wanted_weights(self._model), device)
        self._decoder = Decoder.of(self._model)

    def logits(self, step: PackedStep) -> Tensor:
        """The logits [S, V] of the tokens in `step.sampled`, on the model's device; call it in inference mode."""
        if self._decoder is not None:
            return self._decoder.head(self._decoder.hidden(step)[step.sampled])
        out = self._model(input_ids=step.ids, position_ids=step.positions, use_cache=False, logits_to_keep=step.sampled, step=step, return_dict=True)
        logits: Tensor = out.logits[0]
        return logits

    def logits_and_hidden(self, step: PackedStep) -> tuple[Tensor, Tensor]:
        """`logits`, and with them the last hidden states [N, H] of all tokens: after the final norm, what the LM head reads."""
        if self._decoder is not None:
            hidden = self._decoder.hidden(step)
            return self._decoder.head(hidden[step.sampled]), hidden
        found: list[Tensor] = []
        # What a model does to its logits beside its LM head is its own affair; so it runs as ever, and is overheard.
        hook = self._model.base_model.register_forward_hook(lambda _module, _arguments, out: found.append(out.last_hidden_state))
        try:
            logits = self.logits(step)
        finally:
            hook.remove()
        return logits, found[0][0]

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that were read from files since the start: of adapters one base, once, and then theirs alone."""
        return self._source.bytes_read

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens."""
        embedded: Tensor = self._model.get_input_embeddings()(ids)
        return embedded

    def stage(self, folder: Path) -> dict[str, Tensor]:
        """Reads the weights in `folder`, whole ones or an adapter, into memory, in this model's type, on its device, in the form that is served;
        safe beside a running step.

        WeightsError if there are none, one is missing, one is unknown, a shape or the kind of number differs, or values are not finite in
        the model's type.
        """
        read = self._source.read(folder)
        return dict(read) if self._decoder is None else self._decoder.prepare(read)

    def swap(self, staged: dict[str, Tensor]) -> None:
        """Makes staged weights the served ones by exchanging storage, in microseconds; call it between two steps only."""
        if self._decoder is not None:
            self._decoder.hold(staged)
        else:
            for name, parameter in self._model.named_parameters():
                parameter.data = staged.pop(name)
            buffers = dict(self._model.named_buffers())
            for name, tensor in staged.items():
                buffers[name].copy_(tensor)
        self.loaded = True
