"""The engine's own forward pass: which models it takes, that it computes what they do, and that it holds their weights alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GraniteConfig, MistralConfig

from rollart.engines.embedded.attention import SlotCache
from rollart.engines.embedded.holders import Projection, gathered
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.packing import pack

_SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.15, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_OTHERS = {
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=16, sliding_window=12),
    "granite": lambda: GraniteConfig(**_SHAPE, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.1, logits_scaling=2.0),
}
KNOWN = ["llama", "llama_untied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]


@pytest.fixture(params=[0, 1 << 17], ids=["packed", "plain"])
def packing(request, monkeypatch):
    """From how many numbers on matrices are packed: these models' are all smaller than those that are."""
    monkeypatch.setattr("rollart.engines.embedded.holders._PACKED_FROM", request.param)
    return request.param == 0


@pytest.fixture
def made(tiny):
    """A model of a kind, whose norms and biases were drawn too: as they are made, they would hide in what they are."""

    def build(kind, seed=0):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_OTHERS[kind](), dtype=torch.float32).eval() if kind in _OTHERS else tiny.model(kind, seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape) * 0.2)
        return model

    return build


def load(model, folder, dtype=torch.float32):
    model.save_pretrained(folder)
    return PolicyModel(folder, dtype, torch.device("cpu"))


@torch.inference_mode()
def said(policy, sequences, pieces=(20, 1, 4, 9), in_place=True):
    """Logits [len, V] and hidden states [len, H] of each sequence, read in such pieces beside each other; with slots between them that are idle."""
    slots = np.arange(len(sequences)) * 2 + 1
    table = np.zeros((2 * len(sequences) + 1, 64), dtype=np.int64)
    for slot, sequence in zip(slots, sequences, strict=True):
        table[slot, : len(sequence)] = sequence
    cache = SlotCache(*table.shape)
    parts = [([], []) for _ in sequences]
    starts = np.zeros(len(sequences), dtype=np.int64)
    for piece in pieces:
        counts = np.array([min(piece + i, len(s) - at) for i, (s, at) in enumerate(zip(sequences, starts, strict=True))])
        step = pack(cache, table, slots, starts, counts, counts, policy.device, in_place)
        for found, *both in zip(parts, *(t.split(counts.tolist()) for t in policy.logits_and_hidden(step)), strict=True):
            for to, of in zip(found, both, strict=True):
                to.append(of)
        starts = starts + counts
    return [tuple(torch.cat(p) for p in found) for found in parts]


@torch.no_grad()
def plain(model, sequence):
    """What transformers says of a sequence: logits [len, V] and last hidden states [len, H]."""
    ids = torch.tensor([sequence])
    return model(ids).logits[0], model.base_model(ids).last_hidden_state[0]


def agree(policy, model, prompts):
    for (logits, hidden), prompt in zip(said(policy, prompts), prompts, strict=True):
        expected, states = plain(model, prompt[: len(logits)])
        assert len(logits) == 34 + 4 * prompts.index(prompt)
        assert logits.log_softmax(-1) == pytest.approx(expected.log_softmax(-1), abs=1e-4)
        assert hidden == pytest.approx(states, abs=1e-4)


@pytest.mark.parametrize("kind", [*KNOWN, "granite"])
def test_says_what_transformers_says_and_goes_on_so_after_a_swap(packing, made, tiny, tmp_path, kind):
    prompts = [tiny.prompt(50, seed=s) for s in range(3)]
    policy = load(made(kind), tmp_path / "first")
    assert (policy._decoder is not None) == (kind in KNOWN)
    agree(policy, made(kind), prompts)
    following = made(kind, seed=1)
    following.save_pretrained(tmp_path / "next")
    staged = policy.stage(tmp_path / "next")
    agree(policy, made(kind), prompts)
    policy.swap(staged)
    assert not staged
    agree(policy, following, prompts)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_in_bfloat16_it_is_no_further_from_the_truth_than_transformers(packing, made, tiny, tmp_path, kind):
    prompt, model = tiny.prompt(34), made(kind)
    policy = load(model, tmp_path, torch.bfloat16)
    truth, rounded = plain(model, prompt)[0], plain(made(kind).to(torch.bfloat16), prompt)[0].float()
    ((logits, _),) = said(policy, [prompt])
    assert (logits.float() - truth).abs().mean() < 1.2 * (rounded - truth).abs().mean()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_what_a_row_says_is_equal_to_the_bit_wherever_its_slot_lies_if_its_keys_are_copied(packing, made, tiny, tmp_path, kind):
    policy = load(made(kind), tmp_path)
    prompt, found = tiny.prompt(34), []
    for slot in (1, 3, 5):
        table = np.zeros((7, 64), dtype=np.int64)
        table[slot, :34] = prompt
        with torch.inference_mode():
            step = pack(SlotCache(7, 64), table, np.array([slot]), np.array([0]), np.array([34]), np.array([34]), policy.device, in_place=False)
            found.append(policy.logits(step))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["llama_untied", "qwen3"])
def test_weights_are_held_once_apart_from_a_tied_head_that_is_packed(packing, made, tmp_path, kind):
    policy = load(made(kind), tmp_path)
    kept = {name: p.numel() for name, p in policy._model.named_parameters() if p.numel()}
    assert kept == {"model.embed_tokens.weight": 96 * 64}
    held = policy.stage(tmp_path)
    numbers = sum(t.numel() for t in {id(t): t for t in held.values()}.values())
    assert all(t.is_mkldnn == packing for name, t in held.items() if t.dim() == 2 and name.endswith("weight/fused"))
    named = sum(p.numel() for p in made(kind).parameters())
    heads = (4 + 2 - 2) * 16 * 2 if kind == "qwen3" else 0  # norms of heads are laid out for each of them
    assert numbers - heads == named + (96 * 64 if kind == "qwen3" and packing else 0)


def test_a_folder_may_hold_tied_weights_under_both_names(made, tiny, tmp_path):
    policy, following = load(made("llama"), tmp_path / "first"), made("llama", seed=1)
    state = {name: tensor.clone() for name, tensor in following.state_dict().items()}
    assert "lm_head.weight" in state
    (tmp_path / "next").mkdir()
    save_file(state, tmp_path / "next" / "model.safetensors")
    policy.swap(policy.stage(tmp_path / "next"))
    agree(policy, following, [tiny.prompt(50)])


def test_a_tensor_is_let_go_of_once_all_that_is_made_of_it_is_made():
    class Counted:
        alive = 0

        def __init__(self):
            Counted.alive += 1

        def __del__(self):
            Counted.alive -= 1

    seen = []

    def tensors():
        for name in "abcd":
            seen.append(Counted.alive)
            tensor = torch.ones(2, 2)
            tensor.counted = Counted()
            yield name, tensor
            del tensor

    pairs = [Projection("ab", (), False), Projection("cd", (), False)]
    assert {name: tuple(t.shape) for name, t in gathered(pairs, tensors()).items()} == {"a/fused": (4, 2), "c/fused": (4, 2)}
    assert seen == [0, 1, 0, 1]
