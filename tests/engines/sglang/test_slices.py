"""What each rank of a tensor-parallel server holds: the whole comes back from it, it is what SGLang's own layers load, and it costs its share."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from rollart.engines.sglang.slices import Shape, UnknownLayout, parts_of, pull_rank, rank_of
from storage.format.layout import BLOCK_BYTES
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore
from tests.sglang import PYTHON, needs_sglang

SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
KINDS = {
    "llama": LlamaConfig(**SIZES),
    "llama_tied": LlamaConfig(**{**SIZES, "tie_word_embeddings": True, "vocab_size": 96}),
    "qwen2": Qwen2Config(**{**SIZES, "num_key_value_heads": 4}),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}
RANKS = (1, 2, 4, 8)
PROJECTIONS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def made(kind: str) -> tuple[Shape, dict[str, Tensor]]:
    """A model's shape and its tensors, as a checkpoint has them."""
    config = KINDS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: tensor.detach().normal_() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    return Shape.of({**config.to_dict(), "architectures": [type(model).__name__]}), state


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_ranks_parts_make_up_the_whole_bit_for_bit(kind: str, ranks: int) -> None:
    shape, state = made(kind)
    held = [rank_of(state, shape, rank, ranks) for rank in range(ranks)]
    shapes = {name: tensor.shape for name, tensor in state.items()}
    parts = [{part.name: part for part in parts_of(shapes, shape, rank, ranks)} for rank in range(ranks)]
    for name, tensor in state.items():
        seen = torch.zeros_like(tensor)
        covered = torch.zeros(tensor.shape, dtype=torch.bool)
        for rank in range(ranks):
            part = parts[rank][name]
            rows = part.end - part.start if part.axis == 0 else tensor.shape[0]
            seen[part.cut] = held[rank][part.into][part.row : part.row + rows]
            covered[part.cut] = True
        assert bool(covered.all()) and torch.equal(seen, tensor), name


def test_a_rank_has_merged_parameters_under_sglangs_names_and_its_share_of_each() -> None:
    shape, state = made("qwen2")
    held = rank_of(state, shape, 1, 4)
    assert sorted({name.split(".", 3)[-1] for name in held if name.startswith("model.layers.1.")}) == [
        "input_layernorm.weight", "mlp.down_proj.weight", "mlp.gate_up_proj.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight",
        "self_attn.qkv_proj.bias", "self_attn.qkv_proj.weight",
    ]  # fmt: skip
    at = "model.layers.1."
    assert held[f"{at}self_attn.qkv_proj.weight"].shape == (2 * 16 + 16 + 16, 128) and held[f"{at}self_attn.qkv_proj.bias"].shape == (64,)
    assert held[f"{at}mlp.gate_up_proj.weight"].shape == (2 * 64, 128) and held[f"{at}mlp.down_proj.weight"].shape == (128, 64)
    assert torch.equal(held[f"{at}mlp.gate_up_proj.weight"][64:], state[f"{at}mlp.up_proj.weight"][64:128])


def test_with_fewer_key_and_value_heads_than_ranks_neighbours_have_the_same_one() -> None:
    shape, state = made("llama")
    keys = state["model.layers.0.self_attn.k_proj.weight"]
    for rank in range(8):
        qkv = rank_of(state, shape, rank, 8)["model.layers.0.self_attn.qkv_proj.weight"]
        head = rank // 4
        assert torch.equal(qkv[16:32], keys[16 * head : 16 * head + 16])


@pytest.mark.parametrize(
    ("kind", "ranks", "rows"), [("llama", 2, 512), ("llama", 4, 256), ("llama", 8, 128), ("llama_tied", 4, 32), ("llama_tied", 8, 16)]
)
def test_a_vocabulary_is_padded_with_zeros_and_a_tied_lm_head_is_the_embedding(kind: str, ranks: int, rows: int) -> None:
    shape, state = made(kind)
    embedding = [rank_of(state, shape, rank, ranks)["model.embed_tokens.weight"] for rank in range(ranks)]
    assert {tensor.shape for tensor in embedding} == {(rows, 128)}
    together = torch.cat(embedding)
    assert torch.equal(together[: shape.vocabulary], state["model.embed_tokens.weight"]) and not together[shape.vocabulary :].any()
    assert ("lm_head.weight" in rank_of(state, shape, 0, ranks)) is not shape.tied
    other = {"lm_head.weight" if name == "model.embed_tokens.weight" else name: tensor for name, tensor in state.items()}
    if shape.tied:
        assert torch.equal(rank_of(other, shape, 1, ranks)["model.embed_tokens.weight"], embedding[1])


class Counting(ObjectStore):
    """Counts the bytes of chunks that are read."""

    bytes: list[int]

    def child(self, prefix: str) -> Counting:
        child = super().child(prefix)
        child.bytes = self.bytes
        return child

    def read_into(self, path: Any, buffer: Any, start: int = 0, seen: Any = None) -> int:
        self.bytes.append(len(buffer) if isinstance(buffer, np.ndarray) else sum(map(len, buffer)))
        return super().read_into(path, buffer, start, seen)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_from_the_store_what_it_would_cut_out_of_the_whole(tmp_path: Path, kind: str, ranks: int) -> None:
    shape, state = made(kind)
    WeightStore(str(tmp_path)).publish(state, version=Version(0, 3)).result()
    for rank in range(ranks):
        read = pull_rank(WeightStore(str(tmp_path)), Version(0, 3), shape, rank, ranks)
        cut = rank_of(state, shape, rank, ranks)
        assert read.keys() == cut.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in cut.items())


def test_a_rank_reads_its_share_of_all_rows_and_the_columns_rows(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 1})
    state = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    shape = Shape(config.num_attention_heads, config.num_key_value_heads, config.vocab_size, tied=False)
    WeightStore(str(tmp_path)).publish(state, version=Version(0, 0)).result()
    objects = Counting(str(tmp_path))
    objects.bytes = []
    crossing = sum(tensor.nbytes for name, tensor in state.items() if "o_proj" in name or "down_proj" in name)
    rows = sum(tensor.nbytes for tensor in state.values()) - crossing
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            objects.bytes.clear()
            held = pull_rank(WeightStore.over(objects), Version(0, 0), shape, rank, ranks)
            of_its_own = sum(tensor.nbytes for tensor in held.values())
            assert of_its_own == pytest.approx((rows + crossing) / ranks, rel=0.03)
            slack = 2 * BLOCK_BYTES * len(objects.bytes)
            assert rows / ranks <= sum(objects.bytes) <= rows / ranks * 1.03 + crossing + slack
    assert crossing < 0.3 * (rows + crossing)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "architecture Gemma3ForCausalLM is none of LlamaForCausalLM, Qwen2ForCausalLM"),
        ({}, "architecture none is none of"),
    ],
)
def test_an_architecture_whose_layout_is_not_known_is_named(config: Mapping[str, Any], said: str) -> None:
    with pytest.raises(UnknownLayout, match=said):
        Shape.of(config)


@pytest.mark.parametrize(
    ("name", "size", "ranks", "said"),
    [
        ("model.layers.0.mlp.gate_proj.weight", (10, 4), 4, r"gate_proj.weight \(10\) can't be divided among 4 ranks"),
        ("model.layers.0.self_attn.q_proj.weight", (24, 4), 4, r"q_proj.weight: its heads \(6\) can't be divided among 4"),
        ("model.layers.0.self_attn.k_proj.weight", (8, 4), 3, "3 ranks can't share 2 heads evenly"),
        ("model.layers.0.mlp.experts.0.w1.weight", (8, 4), 2, "is no parameter of LlamaForCausalLM"),
        ("model.layers.0.mlp.router_proj.weight", (8, 4), 2, "is no parameter of LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_divided_is_named_with_what_to_do(name: str, size: tuple[int, int], ranks: int, said: str) -> None:
    with pytest.raises(UnknownLayout, match=said):
        parts_of({name: size}, Shape(6, 2, 100, tied=False), 0, ranks)
    with pytest.raises(ValueError, match="rank 4 is none of 4"):
        parts_of({}, Shape(6, 2, 100, tied=False), 4, 4)


@pytest.mark.slow
@pytest.mark.sglang
@needs_sglang
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "ranks", "rank"), [("llama", 4, 3), ("llama_tied", 8, 6), ("qwen2", 2, 1)])
def test_sglangs_own_layers_load_the_same(tmp_path: Path, kind: str, ranks: int, rank: int) -> None:
    shape, state = made(kind)
    save_file(state, tmp_path / "whole.safetensors")
    numbers = [str(number) for number in (rank, ranks, shape.heads, shape.kv_heads)]
    script = Path(__file__).parents[2] / "sglang" / "loaders.py"
    command = [str(PYTHON), str(script), str(tmp_path / "whole.safetensors"), *numbers, str(tmp_path / "out.safetensors")]
    subprocess.run(command, check=True, timeout=250)
    loaded, ours = load_file(tmp_path / "out.safetensors"), rank_of(state, shape, rank, ranks)
    assert len(loaded) >= 5
    for name, tensor in loaded.items():
        assert torch.equal(ours[name], tensor), name
