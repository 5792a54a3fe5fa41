"""Model states of known sizes to publish and pull; owns names, shapes and types, the values are noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

__all__ = ["STATES", "make", "nbytes", "touched"]

Shape = tuple[int, ...]


def _smollm2_135m() -> Iterator[tuple[str, Shape]]:
    """SmolLM2-135M: 30 layers of width 576, 9 heads and 3 for keys and values, input and output embedding tied."""
    yield "model.embed_tokens.weight", (49152, 576)
    for layer in range(30):
        yield from _block(f"model.layers.{layer}", 576, 192, 1536)
    yield "model.norm.weight", (576,)


def _qwen2_half_billion() -> Iterator[tuple[str, Shape]]:
    """Qwen2.5-0.5B: 24 layers of width 896, 14 heads and 2 for keys and values, input and output embedding tied."""
    yield "model.embed_tokens.weight", (151936, 896)
    for layer in range(24):
        name = f"model.layers.{layer}"
        yield from _block(name, 896, 128, 4864)
        yield from ((f"{name}.self_attn.{part}_proj.bias", (width,)) for part, width in (("q", 896), ("k", 128), ("v", 128)))
    yield "model.norm.weight", (896,)


def _block(name: str, width: int, kv: int, feed_forward: int) -> Iterator[tuple[str, Shape]]:
    for part, shape in {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width), "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (feed_forward, width), "mlp.up_proj": (feed_forward, width), "mlp.down_proj": (width, feed_forward),
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }.items():  # fmt: skip
        yield f"{name}.{part}.weight", shape


STATES = {"SmolLM2-135M": _smollm2_135m, "Qwen2.5-0.5B": _qwen2_half_billion}
"""Name -> names and shapes of a model's tensors, all of them bfloat16."""


def make(name: str) -> dict[str, torch.Tensor]:
    """A state of `STATES` with the standard deviation of trained weights; the same values each time."""
    generator = torch.Generator().manual_seed(0)
    return {key: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.03, generator=generator) for key, shape in STATES[name]()}


def touched(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors like these whose memory the system has handed out already, so that a read into them measures the read."""
    return {name: torch.ones_like(tensor) for name, tensor in state.items()}


def nbytes(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())
