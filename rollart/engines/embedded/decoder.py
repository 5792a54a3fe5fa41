"""The forward pass of the common decoders (Llama, Mistral, Qwen2, Qwen3, Gemma2, Gemma3) on packed steps, with as few tensor operations as it takes.

On a CPU most of a small pass through the transformers module is not arithmetic but what surrounds it. This computes the same from the same weights,
with projections that are fused and packed (`holders`). Owns the order of operations; what differs between the families is read off the transformers
module once. What isn't exactly one of these, this declines, and the transformers module serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollart.engines.embedded.attention import PackedStep, attend
from rollart.engines.embedded.holders import Embedding, Holder, Norm, Projection, gathered, packs

__all__ = ["Decoder"]

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer: attention over `heads` query and `kv_heads` key heads of `dim`, then the gated MLP. The two norms of outputs are Gemma's alone,
    that of queries and keys Qwen3's and Gemma3's. `kind` names the rotary angles, where there are several."""

    input_norm: Norm
    qkv: Projection
    qk_norm: Norm | None
    out: Projection
    attention_norm: Norm | None
    mlp_norm: Norm
    gate_up: Projection
    down: Projection
    output_norm: Norm | None
    act: Callable[[Tensor], Tensor]
    heads: int
    kv_heads: int
    dim: int
    scaling: float
    softcap: float | None
    window: int | None
    kind: str | None

    def holders(self) -> Iterable[Holder]:
        own: tuple[Holder | None, ...] = (
            self.input_norm, self.qkv, self.qk_norm, self.out, self.attention_norm, self.mlp_norm, self.gate_up, self.down, self.output_norm,
        )  # fmt: skip
        return (h for h in own if h is not None)


class Decoder:
    """`hidden` and `head` of a transformers model of a known family, whose weights it takes over; the module keeps its embedding alone."""

    def __init__(self, model: Any) -> None:
        base, config = model.base_model, model.config
        parameters = dict(model.named_parameters())
        weight = model.get_input_embeddings().weight
        self._offset = type(model).__name__.startswith("Gemma")
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._embedding = Embedding(self._name(weight), model.get_input_embeddings())
        self._layers = [self._layer(layer, at, config) for at, layer in enumerate(base.layers)]
        self._norm = self._norm_of(base.norm)
        self._head = self._projection(model.lm_head)
        self._rotary = base.rotary_emb
        self._kinds = {layer.kind for layer in self._layers}
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.vocabulary = weight.shape[0]

    @classmethod
    def of(cls, model: Any) -> Decoder | None:
        """The decoder that computes what `model` does, or None if that isn't exactly one of the families known here."""
        family, module = type(model).__name__.removesuffix("ForCausalLM"), type(model).__module__
        if family not in _FAMILIES or not module.startswith("transformers.models.") or getattr(model.config, "use_bidirectional_attention", None):
            return None
        decoder = cls(model)
        names = {name for holder in decoder.holders() for name in holder.names}
        parameters = dict(model.named_parameters())
        angles, _ = next(iter(decoder._angles(torch.zeros((1, 1), dtype=torch.long, device=model.device), torch.float32).values()))
        if names != set(parameters) or any(p.dtype != model.dtype for p in parameters.values()) or angles.shape[-1] != decoder._layers[0].dim:
            return None
        decoder.hold(decoder.prepare((name, parameter.data) for name, parameter in parameters.items()))
        for name, parameter in parameters.items():
            if name not in decoder._embedding.names:
                parameter.data = parameter.data.new_empty(0)  # held here from now on, and nowhere else
        return decoder

    def holders(self) -> list[Holder]:
        """All that holds weights."""
        return [self._embedding, *(h for layer in self._layers for h in layer.holders()), self._norm, self._head]

    def prepare(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Of checkpoint tensors, what is to be held; safe beside a running step."""
        return gathered(self.holders(), tensors)

    def hold(self, prepared: dict[str, Tensor]) -> None:
        """Computes with prepared weights from now on, all of which it takes out."""
        for holder in self.holders():
            holder.hold(prepared)

    def hidden(self, step: PackedStep) -> Tensor:
        """The last hidden states [N, H] of all tokens, after the final norm."""
        x = self._embedding(step.ids[0])
        angles = self._angles(step.positions, x.dtype)
        for at, layer in enumerate(self._layers):
            x = self._forward(layer, at, x, angles[layer.kind], step)
        return self._norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """The logits [S, V] after hidden states [S, H]."""
        if not len(hidden):
            return hidden.new_empty((0, self.vocabulary))
        logits = self._head(hidden)
        return logits if self._softcap is None else (logits / self._softcap).tanh_() * self._softcap

    def _forward(self, layer: _Layer, at: int, x: Tensor, angles: tuple[Tensor, Tensor], step: PackedStep) -> Tensor:
        rotated = layer.heads + layer.kv_heads
        qkv = layer.qkv(layer.input_norm(x)).view(len(x), rotated + layer.kv_heads, layer.dim)
        qk = qkv[:, :rotated]
        normed = qk if layer.qk_norm is None else layer.qk_norm(qk)
        cos, sin = angles
        # In place of what it is made of, so that keys and values stay one tensor and are written at once.
        torch.addcmul(normed * cos, normed.roll(layer.dim // 2, -1), sin, out=qk)
        keys, values = step.cache.write(at, step.owners, step.positions[0], qkv[:, layer.heads :].view(len(x), 2, layer.kv_heads, layer.dim))
        attended = attend(step, keys, values, qkv[:, : layer.heads], layer.scaling, layer.softcap, layer.window)
        out = layer.out(attended.reshape(len(x), layer.heads * layer.dim))
        x = x + (out if layer.attention_norm is None else layer.attention_norm(out))
        gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, -1)
        out = layer.down(layer.act(gate).mul_(up))
        return x + (out if layer.output_norm is None else layer.output_norm(out))

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> Mapping[str | None, tuple[Tensor, Tensor]]:
        """By kind of layer, cosine and signed sine [N, 1, dim]: x * cos + roll(x, dim / 2) * sin rotates x as transformers' rotate_half does."""
        found: dict[str | None, tuple[Tensor, Tensor]] = {}
        like = torch.empty(0, dtype=dtype, device=positions.device)
        for kind in self._kinds:
            cos, sin = self._rotary(like, positions, kind) if kind is not None else self._rotary(like, positions)
            half = sin.shape[-1] // 2
            found[kind] = (cos[0].unsqueeze(1), torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).unsqueeze(1))
        return found

    def _name(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]

    def _projection(self, *linears: Any) -> Projection:
        like = linears[0].weight
        packed = packs(like.device, like.dtype, sum(linear.weight.numel() for linear in linears))
        biases = [self._name(linear.bias) for linear in linears if linear.bias is not None]
        return Projection((self._name(linear.weight) for linear in linears), biases, packed)

    def _norm_of(self, *norms: Any, counts: tuple[int, ...] = ()) -> Norm:
        epsilon = getattr(norms[0], "variance_epsilon", None)
        return Norm((self._name(n.weight) for n in norms), norms[0].eps if epsilon is None else epsilon, self._offset, counts)

    def _layer(self, layer: Any, at: int, config: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        dim = attention.head_dim
        heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim
        sandwich = hasattr(layer, "pre_feedforward_layernorm")
        window = config.sliding_window if type(attention).__name__ == "MistralAttention" else getattr(attention, "sliding_window", None)
        return _Layer(
            input_norm=self._norm_of(layer.input_layernorm),
            qkv=self._projection(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm=self._norm_of(attention.q_norm, attention.k_norm, counts=(heads, kv_heads)) if hasattr(attention, "q_norm") else None,
            out=self._projection(attention.o_proj),
            attention_norm=self._norm_of(layer.post_attention_layernorm) if sandwich else None,
            mlp_norm=self._norm_of(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
            gate_up=self._projection(mlp.gate_proj, mlp.up_proj),
            down=self._projection(mlp.down_proj),
            output_norm=self._norm_of(layer.post_feedforward_layernorm) if sandwich else None,
            act=mlp.act_fn.forward,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            scaling=attention.scaling,
            softcap=getattr(attention, "attn_logit_softcapping", None),
            window=window,
            kind=config.layer_types[at] if type(attention).__name__ == "Gemma3Attention" else None,
        )
