"""The policy as the trainer sees it: a causal language model that says how likely given tokens are; owns no optimiser.

Only the positions that predict a trained token reach the output layer, which for a small model is most of the work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from rollart.training.errors import StateError
from rollart.training.logits import chunked_logprobs, plain_logprobs
from rollart.training.lora import add_adapters
from rollart.training.microbatch import MicroBatch
from rollart.training.packing import ATTENTION, layout_of
from rollart.training.settings import ModelSettings

__all__ = ["DTYPES", "Policy", "TokenScores", "load_model"]

log = logging.getLogger(__name__)

_LOADING = threading.Lock()
"""transformers sets torch's default type, which is the whole process's, while it makes a model: one at a time."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_model(folder: str | Path, settings: ModelSettings) -> nn.Module:
    """The causal language model of `folder`: with its weights if it holds safetensors, else drawn from `settings.seed`.

    Nothing is downloaded. In evaluation mode, since dropout would make the trainer's log-probabilities differ from the engine's.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise StateError(f"{path} holds no config.json; give the folder of a Hugging Face causal language model")
    with _LOADING:
        return _load(path, settings)


def _load(path: Path, settings: ModelSettings) -> nn.Module:
    dtype = DTYPES[settings.dtype]
    model: nn.Module
    if any(path.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True), dtype=dtype)
    model = model.to(settings.device).eval()
    if settings.lora is not None:
        model = add_adapters(model, settings.lora, settings.seed)
    if settings.recompute:
        _recompute(model)
    return model


def _recompute(model: Any) -> None:
    """Has each layer forget its activations and compute them again in the backward pass: Chen et al. 2016 (arXiv 1604.06174)."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise StateError(f"training.model.recompute: {type(model).__name__} cannot recompute its activations; set it to false")
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True  # the layer's own flag turns recomputation on; what is inside stays in evaluation mode, without dropout


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the trained tokens of a micro-batch: `logprobs` and `entropies` [N] in nats, and, if asked for, the hidden states [N, H] that
    predict them, or with `states` those of all its B * T positions."""

    logprobs: Tensor
    entropies: Tensor
    hidden: Tensor | None
    states: Tensor | None = None


class Policy:
    """A Hugging Face causal language model, asked for the log-probabilities of the trained tokens of a micro-batch.

    `head_rows` is how many tokens' logits are in memory at once. Whatever asks the model runs `within` it: a model that is spread over
    ranks makes its tensors whole for that. With `packing`, `packs` says whether the model computes
    packed rows rightly; if not, it is to be given padded ones.
    """

    def __init__(self, model: nn.Module, *, head_rows: int = 1024, packing: bool = False) -> None:
        self.model = model
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.head_rows = head_rows
        self.within: Callable[..., Any] = _plainly
        self._split = self._head_is_all()
        self.packs = packing and self._can_pack()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The format of log-probabilities and losses: never narrower than float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that reach the output layer."""
        model: Any = self.model
        return int(model.get_output_embeddings().weight.shape[1])

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name; tied ones once, under the first of their names."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def logprobs(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets under softmax(logits / temperature) and the distributions' entropies, both [N], in nats; of tokens that
        were sampled under a cut, over what that kept.

        `entropy_gradient` says whether the entropies are to be differentiated.
        """
        scores = self.score(micro, entropy_gradient=entropy_gradient)
        return scores.logprobs, scores.entropies

    @property
    def output_weight(self) -> Tensor:
        """The output layer's [V, H]."""
        model: Any = self.model
        weight: Tensor = model.get_output_embeddings().weight
        return weight

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens, as the model itself begins with them."""
        model: Any = self.model
        embedded: Tensor = model.get_input_embeddings()(ids)
        return embedded

    @torch.no_grad()
    def probabilities(self, states: Tensor, temperature: Tensor | None, tokens: Tensor) -> Tensor:
        """Of hidden states [N, H]: the probabilities [N, R] of `tokens` int64 [R] under softmax(logits / temperature), logits of `head_rows`
        states at a time."""
        found = states.new_empty((len(states), len(tokens)), dtype=self.compute_dtype)
        for at in range(0, len(states), self.head_rows):
            part = slice(at, at + self.head_rows)
            logits = self._head()(states[part]).to(self.compute_dtype)
            if temperature is not None:
                logits = logits / temperature[part].unsqueeze(1)
            found[part] = logits.softmax(-1).index_select(1, tokens)
        return found

    def score(self, micro: MicroBatch, *, entropy_gradient: bool = False, hidden: bool = False, states: bool = False) -> TokenScores:
        """What `logprobs` says and, with `hidden`, the states that it was said from; with `states`, those of all positions."""
        return TokenScores(*self.within(self._score, micro, entropy_gradient, hidden, states))

    def _score(self, micro: MicroBatch, entropy_gradient: bool, hidden: bool, every: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        temperature = micro.temperature if micro.tempered else None
        if not self._split:
            found = self.model(**_inputs(micro), use_cache=False, output_hidden_states=hidden or every)
            logits = found.logits.flatten(0, 1).index_select(0, micro.index).to(self.compute_dtype)
            whole = found.hidden_states[-1].flatten(0, 1) if hidden or every else None
            states = whole.index_select(0, micro.index) if hidden and whole is not None else None
            chosen, entropy = plain_logprobs(logits, micro.targets, temperature, micro.cut, entropy_gradient=entropy_gradient)
            return chosen, entropy, states, whole if every else None
        # No attention mask: padding stands on the right, where a causal model never looks, and without a mask attention
        # takes its fastest path.
        body = self._body(**_inputs(micro)).flatten(0, 1)
        states = body.index_select(0, micro.index)  # [N, H]
        head = self._head()
        if len(states) > self.head_rows and type(head) is nn.Linear:
            chosen, entropy = chunked_logprobs(
                states, head.weight, head.bias, micro.targets, temperature, self.head_rows, micro.cut, entropy_gradient=entropy_gradient
            )
        else:
            logits = head(states).to(self.compute_dtype)
            chosen, entropy = plain_logprobs(logits, micro.targets, temperature, micro.cut, entropy_gradient=entropy_gradient)
        return chosen, entropy, states if hidden else None, body if every else None

    def _body(self, **inputs: Any) -> Tensor:
        body: Any = self.model.base_model
        return body(**inputs, use_cache=False).last_hidden_state

    def _head(self) -> nn.Module:
        model: Any = self.model
        return model.get_output_embeddings()

    def _head_is_all(self) -> bool:
        """Whether logits are the output layer's and nothing more; some families scale or cap them afterwards."""
        ids = self._probe(3)
        with torch.no_grad():
            whole = self.model(input_ids=ids, use_cache=False).logits
            return torch.equal(self._head()(self._body(input_ids=ids)), whole)

    def _can_pack(self) -> bool:
        """Tries a packed row against its sequences alone: a family may cap its scores, or carry a state from one to the next."""
        model: Any = self.model
        before = model.config._attn_implementation
        lengths = (2, 3, 5)
        ids = self._probe(sum(lengths))
        with torch.no_grad():
            alone = [self._body(input_ids=part)[0] for part in ids.split(lengths, dim=1)]
            model.set_attn_implementation(ATTENTION)
            try:
                layout = layout_of(lengths).to(self.device)
                packed = self._body(input_ids=ids, position_ids=layout.positions, layout=layout)[0]
                alike = _alike(packed, torch.cat(alone))
            except (NotImplementedError, TypeError) as error:
                log.info("%s cannot be packed: %s", type(model).__name__, error)
                alike = False
        if not alike:
            model.set_attn_implementation(before)
            log.warning("training.batch.packing: %s does not compute packed rows rightly; its batches are padded", type(model).__name__)
        return alike

    def _probe(self, length: int) -> Tensor:
        """Some ids [1, length]."""
        model: Any = self.model
        vocabulary = int(model.get_output_embeddings().weight.shape[0])
        return torch.arange(length, device=self.device).unsqueeze(0) % vocabulary


def _plainly(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


_ALIKE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""How far a token's state may differ by rounding, as a share of its length. Where tokens see those of another sequence it is some tenths."""


def _alike(packed: Tensor, alone: Tensor) -> bool:
    """Whether the states [T, H] are the same but for rounding.

    Judged by token and not by number: in trained models single entries are a hundred times the others, and round as coarsely for all.
    """
    wide = torch.promote_types(alone.dtype, torch.float32)
    apart = (packed.to(wide) - alone.to(wide)).norm(dim=-1)
    return bool((apart <= _ALIKE[alone.dtype] * alone.to(wide).norm(dim=-1)).all())


def _inputs(micro: MicroBatch) -> dict[str, Any]:
    if micro.layout is None:
        return {"input_ids": micro.ids}
    return {"input_ids": micro.ids, "position_ids": micro.layout.positions, "layout": micro.layout}
