import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from rollart.training.batch import build_batch
from rollart.training.errors import StateError
from rollart.training.microbatch import micro_batches
from rollart.training.policy import Policy, load_model
from rollart.training.settings import BatchSettings, ModelSettings
from rollart.types import SamplingTransform

BUDGET = BatchSettings(token_budget=10_000)


def _whole(trajectories):
    batch = build_batch(trajectories, {t.attempt: 1.0 for t in trajectories}, 0)
    (micro,) = micro_batches(batch.sequences, BUDGET)
    return batch, micro.to(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropies_agree_with_a_plain_forward_of_each_sequence_alone(llama: Path, make_trajectories, temperature: float) -> None:
    policy = Policy(load_model(llama, ModelSettings(seed=3)))
    _, micro = _whole(make_trajectories(transform=SamplingTransform(temperature=temperature)))
    found, entropy = policy.logprobs(micro)
    at = 0
    for row, ids in enumerate(micro.ids):
        n = micro.counts[row]
        places = micro.index[at : at + n] - row * micro.ids.shape[1]
        with torch.no_grad():
            logits = policy.model(input_ids=ids[: int(places.max()) + 1].unsqueeze(0)).logits[0, places]
        log_p = torch.log_softmax(logits / temperature, -1)
        torch.testing.assert_close(found[at : at + n], log_p.gather(1, micro.targets[at : at + n, None])[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy[at : at + n], -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)
        at += n
    assert at == len(found)


def test_a_family_that_caps_its_logits_is_forwarded_whole(tmp_path: Path, make_trajectories) -> None:
    Gemma2Config(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        final_logit_softcapping=0.05, query_pre_attn_scalar=8,
    ).save_pretrained(tmp_path)  # fmt: skip
    policy = Policy(load_model(tmp_path, ModelSettings()))
    _, micro = _whole(make_trajectories((1,)))
    with torch.no_grad():
        logits = policy.model(input_ids=micro.ids, use_cache=False).logits.flatten(0, 1)[micro.index]
        expected = torch.log_softmax(logits, -1).gather(1, micro.targets[:, None])[:, 0]
        found, _ = policy.logprobs(micro)
    assert logits.abs().max() <= 0.05
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_what_stands_in_the_padding_changes_nothing(llama: Path, make_trajectories) -> None:
    policy = Policy(load_model(llama, ModelSettings()))
    batch, micro = _whole(make_trajectories())
    with torch.no_grad():
        before, _ = policy.logprobs(micro)
        for row, sequence in enumerate(sorted(batch.sequences, key=lambda s: s.inputs)):
            micro.ids[row, sequence.inputs :] = random.Random(row).randrange(13)
        after, _ = policy.logprobs(micro)
    assert torch.equal(before, after)


def test_initial_weights_follow_from_the_seed_and_leave_the_global_generator_alone(llama: Path) -> None:
    state = torch.get_rng_state()
    first, second, other = (load_model(llama, ModelSettings(seed=s)).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_folders_own_weights_are_used(tmp_path: Path, llama: Path) -> None:
    model = load_model(llama, ModelSettings(seed=5))
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, ModelSettings(seed=6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert isinstance(again, type(AutoModelForCausalLM.from_pretrained(tmp_path)))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"config\.json"):
        load_model(tmp_path, ModelSettings())
