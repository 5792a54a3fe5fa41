"""The multi-step loss beside drafting done one token after the other, as an engine does it."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from rollart.drafts.config import HeadConfig
from rollart.drafts.head import DraftHead
from rollart.drafts.loss import DECAY, DraftLoss, Texts, draft_loss
from rollart.drafts.own_steps import shifted

STEPS = 3
KEPT = (0, 2, 3, 5, 7, 11)


@pytest.fixture(scope="module")
def made() -> tuple[DraftHead, Texts, Tensor]:
    """A head over half of the tokens, texts with an uneven weight a place, and the policy's whole distributions [B, N, V]."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    head = DraftHead(HeadConfig.of(config, kept=len(KEPT)), torch.tensor(KEPT))
    ids = torch.randint(12, (3, 9))
    with torch.no_grad():
        hidden, embeddings = model.model(ids).last_hidden_state, model.get_input_embeddings()(ids)
        p = model(ids).logits.softmax(-1)
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    places = torch.tensor([2, 3, 8, 1, 2, 4, 5, 6])
    weights = torch.linspace(0.5, 1.5, len(rows)) / len(rows)
    return head, Texts(hidden, embeddings, rows, places, p[rows, places][:, list(KEPT)], weights), p


def drafted(head: DraftHead, texts: Texts, row: int, place: int, step: int) -> Tensor | None:
    """Log-probabilities of what comes after `place`, where `step` tokens before were drafted; None where the text is too short for it."""
    at = place - 1
    if at < step:
        return None
    hidden = texts.hidden[row : row + 1, : at - step + 1]
    for drafts in range(step + 1):
        n = hidden.shape[1]
        features = head(hidden, texts.embeddings[row : row + 1, 1 : n + 1], torch.arange(n).unsqueeze(0))
        if drafts < step:
            hidden = torch.cat([hidden, features[:, -1:]], 1)
    return head.logits(features[0, -1]).log_softmax(-1)


def one_by_one(head: DraftHead, texts: Texts) -> tuple[Tensor, list[float]]:
    """The loss, and by step the weighted chance of acceptance."""
    loss, accepted = torch.zeros(()), []
    for step in range(STEPS):
        accepted.append(0.0)
        for row, place, p, w in zip(texts.rows.tolist(), texts.places.tolist(), texts.targets, texts.weights, strict=True):
            logprobs = drafted(head, texts, row, place, step)
            if logprobs is not None:
                loss = loss - DECAY**step * w * (p / p.sum() * logprobs).sum()
                accepted[-1] += float(w * torch.minimum(p, logprobs.detach().exp()).sum())
    return loss, accepted


def test_the_loss_and_its_gradient_are_those_of_drafting_one_token_after_the_other(made):
    head, texts, _ = made
    found = draft_loss(head, texts, STEPS)
    expected, accepted = one_by_one(head, texts)
    assert float(found.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert found.accepted == pytest.approx(accepted, abs=1e-6)
    parameters = list(head.parameters())
    for ours, theirs in zip(torch.autograd.grad(found.loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_places_without_room_for_a_steps_drafts_count_for_nothing_in_it(made):
    head, texts, _ = made
    found = draft_loss(head, texts, STEPS)
    w = texts.weights
    assert found.weight == pytest.approx((float(w.sum()), float(w.sum() - w[3]), float(w.sum() - w[3] - w[0] - w[4])))


def test_acceptance_is_one_minus_the_total_variation_over_the_whole_vocabulary(made):
    head, texts, whole = made
    found: DraftLoss = draft_loss(head, texts, 1)
    q = torch.zeros(len(texts.rows), whole.shape[-1])
    for i, (row, place) in enumerate(zip(texts.rows.tolist(), texts.places.tolist(), strict=True)):
        q[i, list(KEPT)] = drafted(head, texts, row, place, 0).detach().exp()
    variation = 0.5 * (whole[texts.rows, texts.places] - q).abs().sum(-1)
    assert found.accepted[0] == pytest.approx(float((texts.weights * (1 - variation)).sum()), abs=1e-6)


def test_no_gradient_goes_back_into_what_the_policy_computed(made):
    head, texts, _ = made
    hidden = texts.hidden.clone().requires_grad_()
    loss = draft_loss(head, Texts(hidden.detach(), texts.embeddings, texts.rows, texts.places, texts.targets, texts.weights), STEPS).loss
    loss.backward()
    assert hidden.grad is None
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in head.parameters())
    head.zero_grad()


def test_moving_on_by_places_fills_with_zeros():
    values = torch.arange(1.0, 5.0).view(1, 4, 1)
    assert shifted(values, 0) is values
    assert shifted(values, 3).flatten().tolist() == [0.0, 0.0, 0.0, 1.0]
