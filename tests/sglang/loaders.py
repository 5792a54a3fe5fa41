"""Run by SGLang's own interpreter: what its parallel layers make of whole tensors on one rank, `loaders.py WHOLE RANK RANKS HEADS KV_HEADS OUT`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.layers import linear, vocab_parallel_embedding


def main(whole: str, rank: int, ranks: int, heads: int, kv_heads: int, out: str) -> None:
    state = load_file(whole)
    # The ranks of a process group that is not there: the layers ask for nothing else of it while they load.
    linear._resolve_linear_group = lambda group: linear._LogicalGroup(rank, ranks)
    vocab_parallel_embedding.get_parallel = lambda: SimpleNamespace(tp_rank=rank, tp_size=ranks, attn_tp_rank=rank, attn_tp_size=ranks)
    vocab_parallel_embedding._resolve_linear_group = lambda group: linear._LogicalGroup(rank, ranks)
    torch.set_default_dtype(torch.float32)
    found: dict[str, torch.Tensor] = {}

    def loaded(name: str, layer: Any, *pieces: tuple[str, Any]) -> None:
        for kind in ("weight", "bias"):
            parameter = getattr(layer, kind, None)
            if parameter is None:
                continue
            parameter.data.fill_(torch.nan)
            for source, place in pieces:
                parameter.weight_loader(parameter, state[f"{source}.{kind}"], *(() if place is None else (place,)))
            found[f"{name}.{kind}"] = parameter.data

    q, gate, o, down = (state[f"model.layers.0.{name}.weight"] for name in ("self_attn.q_proj", "mlp.gate_proj", "self_attn.o_proj", "mlp.down_proj"))
    at = "model.layers.0."
    biased = f"{at}self_attn.q_proj.bias" in state
    qkv = linear.QKVParallelLinear(q.shape[1], q.shape[0] // heads, heads, kv_heads, bias=biased)
    loaded(f"{at}self_attn.qkv_proj", qkv, *((f"{at}self_attn.{n}_proj", n) for n in "qkv"))
    both = linear.MergedColumnParallelLinear(gate.shape[1], [gate.shape[0]] * 2, bias=False)
    loaded(f"{at}mlp.gate_up_proj", both, (f"{at}mlp.gate_proj", 0), (f"{at}mlp.up_proj", 1))
    for name, tensor in (("self_attn.o_proj", o), ("mlp.down_proj", down)):
        loaded(at + name, linear.RowParallelLinear(tensor.shape[1], tensor.shape[0], bias=False), (at + name, None))
    embedding = state["model.embed_tokens.weight"]
    loaded("model.embed_tokens", vocab_parallel_embedding.VocabParallelEmbedding(*embedding.shape), ("model.embed_tokens", None))
    if "lm_head.weight" in state:
        loaded("lm_head", vocab_parallel_embedding.ParallelLMHead(*embedding.shape), ("lm_head", None))
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:6]), sys.argv[6])
