"""The policy as the trainer sees it: a causal language model that says how likely given tokens are; owns no optimiser.

Only the positions that predict a trained token reach the output layer, which for a small model is most of the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.training.errors import StateError
from rollart.training.microbatch import MicroBatch
from rollart.training.settings import ModelSettings

__all__ = ["DTYPES", "Policy", "load_model"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_model(folder: str | Path, settings: ModelSettings) -> nn.Module:
    """The causal language model of `folder`: with its weights if it holds safetensors, else drawn from `settings.seed`.

    Nothing is downloaded. In evaluation mode, since dropout would make the trainer's log-probabilities differ from the engine's.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise StateError(f"{path} holds no config.json; give the folder of a Hugging Face causal language model")
    dtype = DTYPES[settings.dtype]
    model: nn.Module
    if any(path.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True), dtype=dtype)
    return model.to(settings.device).eval()


class Policy:
    """A Hugging Face causal language model, asked for the log-probabilities of the trained tokens of a micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype
        self._split = self._head_is_all()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The format of log-probabilities and losses: never narrower than float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name; tied ones once, under the first of their names."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets under softmax(logits / temperature) and the distributions' entropies, both [N], in nats.

        `entropy_gradient` says whether the entropies are to be differentiated.
        """
        logits = self._logits(micro).to(self.compute_dtype)  # [N, V]
        if micro.tempered:
            logits = logits / micro.temperature.unsqueeze(1)
        log_p = torch.log_softmax(logits, dim=-1)
        chosen = log_p.gather(1, micro.targets.unsqueeze(1)).squeeze(1)
        seen = log_p if entropy_gradient else log_p.detach()
        return chosen, -(seen.exp() * seen).sum(-1)

    def _logits(self, micro: MicroBatch) -> Tensor:
        """Logits [N, V] at the positions that predict a trained token.

        No attention mask: padding stands on the right, where a causal model never looks, and without a mask attention
        takes its fastest path.
        """
        if not self._split:
            return self.model(input_ids=micro.ids, use_cache=False).logits.flatten(0, 1).index_select(0, micro.index)
        hidden = self._body(micro.ids)  # [B, T, H]
        return self._head(hidden.flatten(0, 1).index_select(0, micro.index))

    def _body(self, ids: Tensor) -> Tensor:
        body: Any = self.model.base_model
        return body(input_ids=ids, use_cache=False).last_hidden_state

    def _head(self, hidden: Tensor) -> Tensor:
        model: Any = self.model
        return model.get_output_embeddings()(hidden)

    def _head_is_all(self) -> bool:
        """Whether logits are the output layer's and nothing more; some families scale or cap them afterwards."""
        ids = torch.arange(3, device=self.device).unsqueeze(0) % self._head_width()
        with torch.no_grad():
            whole = self.model(input_ids=ids, use_cache=False).logits
            return torch.equal(self._head(self._body(ids)), whole)

    def _head_width(self) -> int:
        model: Any = self.model
        return int(model.get_output_embeddings().weight.shape[0])
