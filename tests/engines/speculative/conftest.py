"""Whether tokens come from the distributions that they should: tests of it, and models so small that thousands of samples take seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rollart.drafts.config import HeadConfig
from rollart.drafts.head import DraftHead
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.scheduler import Scheduler
from rollart.types import SamplingTransform

torch.set_num_threads(1)

VOCABULARY = 12
_NUMBERS = count()


def p_value(statistic: float, freedom: float) -> float:
    """The chi-square distribution's upper tail at `statistic`, from the regularised incomplete gamma function."""
    half, x = torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, x))


def goodness(counts: np.ndarray, expected: np.ndarray) -> float:
    """How likely `counts` [V] are at least as far from a multinomial of `expected` shares [V] as they are; 0 if one has no share."""
    if counts[expected <= 0].any():
        return 0.0
    wanted = expected / expected.sum() * counts.sum()
    rare = wanted < 5
    counts, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(wanted[~rare], wanted[rare].sum())
    seen = wanted > 0
    return p_value(float(((counts - wanted) ** 2 / np.where(seen, wanted, 1)).sum()), max(int(seen.sum()) - 1, 1))


def two_samples(left: Sequence[Any], right: Sequence[Any]) -> float:
    """How likely two samples of one distribution differ as much as these do (chi-square; what is rare counts as one)."""
    values = sorted(set(left) | set(right))
    number = {v: i for i, v in enumerate(values)}
    table = np.array([np.bincount([number[v] for v in side], minlength=len(values)) for side in (left, right)], dtype=float)
    rare = table.sum(0) < 10
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)])
    table = table[:, table.sum(0) > 0]
    wanted = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    return p_value(float(((table - wanted) ** 2 / wanted).sum()), max(table.shape[1] - 1, 1))


def calibration(tokens: np.ndarray, probabilities: np.ndarray, groups: np.ndarray) -> float:
    """How likely tokens [N], each drawn from its own row of `probabilities` [N, V], are off as much as these are within `groups` [N].

    In each group, counts less their expectations have the covariance sum(diag(p) - p p'); whatever the draws' order and dependence
    through the past, since their differences from expectation are a martingale's.
    """
    statistic, freedom = 0.0, 0
    for group in np.unique(groups):
        at = groups == group
        p = probabilities[at].astype(float)
        off = np.bincount(tokens[at], minlength=p.shape[1]) - p.sum(0)
        values, vectors = np.linalg.eigh(np.diag(p.sum(0)) - p.T @ p)
        held = values > 3.0
        statistic += float(((vectors[:, held].T @ off) ** 2 / values[held]).sum())
        freedom += int(held.sum())
        if (np.bincount(tokens[at], minlength=p.shape[1])[p.sum(0) <= 0] > 0).any():
            return 0.0
    return p_value(statistic, freedom)


@pytest.fixture(scope="session")
def statistics() -> Any:
    """The tests above; each gives a probability, which under 1e-4 means that something is wrong (1e-12 and less in fact)."""
    from types import SimpleNamespace

    return SimpleNamespace(goodness=goodness, two_samples=two_samples, calibration=calibration)


def small_model(seed: int = 0, layers: int = 1, vocabulary: int = VOCABULARY, scale: float = 0.3) -> Any:
    """A model in fp32 whose distributions are far from even and differ much from prefix to prefix."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=128, initializer_range=scale, eos_token_id=1, bos_token_id=0, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def small() -> Callable[..., Any]:
    return small_model


def blend(model: Any, other: Any, share: float) -> Any:
    """A model whose weights are those of `model`, moved by `share` towards those of `other`: one that is near it, but not it."""
    mixed = small_model(layers=model.config.num_hidden_layers, vocabulary=model.config.vocab_size)
    with torch.no_grad():
        for m, a, b in zip(mixed.parameters(), model.parameters(), other.parameters(), strict=True):
            m.copy_((1 - share) * a + share * b)
    return mixed


@pytest.fixture(scope="session")
def near() -> Callable[..., Any]:
    return blend


def head_of(model: Any, kept: Sequence[int] | None = None, steps: int = 0, seed: int = 0) -> DraftHead:
    """A head on `model` with random weights, or trained for so many steps to follow it on its own text."""
    torch.manual_seed(seed)
    head = DraftHead(HeadConfig.of(model.config, kept=None if kept is None else len(kept)), None if kept is None else torch.tensor(kept))
    if not steps:
        return head
    head.start_from(model.get_output_embeddings().weight.detach())
    ids = torch.tensor([[5, 7, 3]]).repeat(128, 1)
    with torch.no_grad():
        for _ in range(12):
            p = model(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(p, 1)], 1)
        hidden = model.model(ids).last_hidden_state
        # Place t of the head says what comes after x_{t+1}, as place t + 1 of the policy does.
        wanted = model(ids).logits[:, 1:, head.kept].softmax(-1)
        embeddings = model.get_input_embeddings()(ids[:, 1:])
    positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    optimiser = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(steps):
        logprobs = head.logits(head(hidden[:, :-1], embeddings, positions)).log_softmax(-1)
        loss = -(wanted * logprobs).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head


@pytest.fixture(scope="session")
def headed() -> Callable[..., DraftHead]:
    """`head_of`."""
    return head_of


@pytest.fixture
def policy(tmp_path) -> Callable[[Any], PolicyModel]:
    """The engine's form of a model."""

    def load(model: Any) -> PolicyModel:
        folder = tmp_path / f"model-{next(_NUMBERS)}"
        model.save_pretrained(folder)
        return PolicyModel(folder, torch.float32, torch.device("cpu"))

    return load


@pytest.fixture
def schedule(policy) -> Callable[..., Scheduler]:
    """A scheduler over a model, of version 0-0; `speculator` is made from the engine's form of the model."""

    def build(model: Any, slots: int = 8, max_length: int = 64, chunk: int = 4096, **options: Any) -> Scheduler:
        return Scheduler(policy(model), slots, max_length, chunk, "0-0", options.pop("report", lambda _: None), **options)

    return build


def ask(prompt: Sequence[int], tokens: int, temperature: float = 0.0, seed: int = 0, stop: Sequence[int] = (), **more: Any) -> Request:
    transform = SamplingTransform(temperature, **{k: more.pop(k) for k in ("top_p", "top_k", "min_p") if k in more})
    return Request(str(next(_NUMBERS)), tuple(prompt), tokens, transform, seed, frozenset(stop), **more)


@pytest.fixture(scope="session")
def asking() -> Callable[..., Request]:
    return ask


def run_out(scheduler: Scheduler, *requests: Request) -> tuple[Request, ...]:
    for request in requests:
        scheduler.add(request)
    while any(r.finish is None for r in requests):
        scheduler.step()
    return requests


@pytest.fixture(scope="session")
def finish() -> Callable[..., tuple[Request, ...]]:
    """Adds requests and steps until all have ended."""
    return run_out
