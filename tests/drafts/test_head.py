"""A draft head: what it computes, what its folder holds, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from rollart.drafts.config import HeadConfig
from rollart.drafts.errors import DraftError
from rollart.drafts.folder import load_head, save_head
from rollart.drafts.head import DraftHead, causal

torch.set_num_threads(1)

POLICY = LlamaConfig(hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=20, intermediate_size=48)


def make(**sizes):
    torch.manual_seed(0)
    return DraftHead(HeadConfig.of(POLICY, **sizes), torch.arange(1, 20, 2)[: sizes["kept"]] if "kept" in sizes else None).requires_grad_(False)


def inputs(batch=2, places=7):
    generator = torch.Generator().manual_seed(1)
    hidden, embeddings = (torch.randn(batch, places, 24, generator=generator) for _ in range(2))
    return hidden, embeddings, torch.arange(places).expand(batch, places)


@pytest.mark.parametrize(("sizes", "tokens"), [({}, 20), ({"kept": 10}, 10), ({"width": 16, "kept": 4}, 4)])
def test_it_makes_features_as_wide_as_hidden_states_and_logits_of_the_kept_tokens(sizes, tokens):
    head = make(**sizes)
    features = head(*inputs())
    assert features.shape == (2, 7, 24)
    assert head.logits(features).shape == (2, 7, tokens)


def test_a_place_depends_on_those_before_it_and_on_its_distance_to_them_alone():
    head, (hidden, embeddings, positions) = make(), inputs()
    features = head(hidden, embeddings, positions)
    changed = hidden.clone()
    changed[:, 4] += 1
    after = head(changed, embeddings, positions)
    assert torch.equal(after[:, :4], features[:, :4])
    assert (after[:, 4:] - features[:, 4:]).abs().amax(-1).min() > 1e-4
    assert head(hidden, embeddings, positions + 100) == pytest.approx(features, abs=1e-4)
    assert (head(hidden, embeddings, positions * 3) - features)[:, 1:].abs().max() > 1e-3


def test_who_calls_it_decides_what_a_place_sees():
    """One place after the other with the keys kept, as an engine does it, is the same as all at once."""
    head, (hidden, embeddings, positions) = make(), inputs()
    keys, values, features = [], [], []

    def remembered(query, key, value):
        keys.append(key)
        values.append(value)
        k, v = torch.cat(keys, 2), torch.cat(values, 2)
        return torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)

    for t in range(7):
        at = slice(t, t + 1)
        features.append(head(hidden[:, at], embeddings[:, at], positions[:, at], remembered))
    assert torch.cat(features, 1) == pytest.approx(head(hidden, embeddings, positions, causal), abs=1e-5)


def test_it_may_start_with_the_policys_own_rows_of_the_kept_tokens():
    head, output = make(kept=4), torch.randn(20, 24)
    head.start_from(output)
    features = head(*inputs())
    assert torch.equal(head.logits(features), features @ output[[1, 3, 5, 7]].T)
    with pytest.raises(DraftError, match=r"shape \(19, 24\)"):
        head.start_from(output[:19])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_gives_the_same_head_back(tmp_path, dtype):
    head = make(width=16, kept=4).to(dtype)
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head", dtype)
    assert again.config == head.config
    assert {n: t.dtype for n, t in again.state_dict().items()} == {n: t.dtype for n, t in head.state_dict().items()}
    assert again.kept.tolist() == [1, 3, 5, 7]
    hidden, embeddings, positions = inputs()
    assert torch.equal(again(hidden.to(dtype), embeddings.to(dtype), positions), head(hidden.to(dtype), embeddings.to(dtype), positions))


def test_a_head_of_another_policy_is_refused_with_what_differs():
    config = HeadConfig.of(POLICY)
    config.refuse_misfit(POLICY)
    other = LlamaConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=21)
    with pytest.raises(DraftError, match=r"hidden_size 24 \(the policy has 32\), vocab_size 20 \(the policy has 21\)"):
        config.refuse_misfit(other)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 15}, "width 15"),
        ({"heads": 3, "kv_heads": 2}, "no multiple of kv_heads"),
        ({"kept": 21}, "over the vocabulary"),
        ({"kept": 0}, "kept is 0"),
        ({"hidden": "24"}, "hidden is '24'"),
        ({"more": 1}, "more is unknown"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
    ],
)
def test_a_config_that_can_not_be_is_refused_with_the_field(changes, said):
    document = {**HeadConfig.of(POLICY).document(), **changes}
    with pytest.raises(DraftError, match=said):
        HeadConfig.from_document(document)


@pytest.mark.parametrize("kept", [[3, 1, 5, 7], [1, 1, 5, 7], [1, 3, 5, 20], [1, 3, 5]])
def test_kept_tokens_that_are_no_ascending_ids_of_the_policys_are_refused(kept):
    with pytest.raises(DraftError, match="kept"):
        DraftHead(HeadConfig.of(POLICY, kept=4), torch.tensor(kept))


def test_damaged_folders_are_refused_with_what_is_wrong(tmp_path):
    folder = tmp_path / "head"
    with pytest.raises(DraftError, match=r"config\.json cannot be read"):
        load_head(folder)
    save_head(make(kept=4), folder)
    tensors = load_file(folder / "model.safetensors")
    for changed, said in (
        ({**tensors, "fc.weight": tensors["fc.weight"][:, :-1].contiguous()}, r"fc.weight has shape \(24, 47\)"),
        ({n: t for n, t in tensors.items() if n != "kept"}, "lack kept"),
        ({**tensors, "more": tensors["fc.weight"].clone()}, "unknown more"),
        ({**tensors, "kept": tensors["kept"].float()}, "kept is of torch.float32"),
        ({**tensors, "norm.weight": tensors["norm.weight"] * torch.inf}, "not finite"),
        ({**tensors, "kept": tensors["kept"].flip(0)}, "ascend"),
    ):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(DraftError, match=said):
            load_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DraftError, match=r"model\.safetensors cannot be read"):
        load_head(folder)
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(DraftError, match="no object"):
        load_head(folder)
