"""Chunks of the output layer against the whole of it, in value and gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollart.training.batch import build_batch
from rollart.training.learner import Learner, Minibatch
from rollart.training.logits import chunked_logprobs, plain_logprobs
from rollart.training.observe import Observations
from rollart.training.settings import LearnerSettings
from rollart.types import SamplingTransform

N, H, V = 11, 5, 17


def _tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (2 * torch.randn(*s, generator=g, dtype=torch.float64) for s in ((N, H), (V, H), (V,)))
    return (
        hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_(),
        torch.randint(V, (N,), generator=g), 0.5 + torch.rand(N, generator=g, dtype=torch.float64),
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
@pytest.mark.parametrize("tempered", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("of", ["logprobs", "both"])
def test_chunks_equal_the_whole_in_value_and_gradient(rows: int, tempered: bool, biased: bool, of: str) -> None:
    g = torch.Generator().manual_seed(9)
    weigh = torch.randn(2, N, generator=g, dtype=torch.float64)
    found = []
    for chunked in (False, True):
        hidden, weight, bias, targets, temperature = _tensors()
        t, b = (temperature if tempered else None), (bias if biased else None)
        if chunked:
            chosen, entropy = chunked_logprobs(hidden, weight, b, targets, t, rows, entropy_gradient=of == "both")
        else:
            chosen, entropy = plain_logprobs(torch.nn.functional.linear(hidden, weight, b), targets, t, entropy_gradient=of == "both")
        assert entropy.requires_grad is (of == "both")
        (weigh[0] * chosen + (weigh[1] * entropy if of == "both" else 0.0)).sum().backward()
        found.append([chosen, entropy, hidden.grad, weight.grad, *([bias.grad] if biased else [])])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(found[0][2].norm() > 0.1, torch.tensor(True))


def test_the_gradient_is_that_of_finite_differences() -> None:
    hidden, weight, bias, targets, temperature = _tensors()
    assert torch.autograd.gradcheck(lambda h, w, b: chunked_logprobs(h, w, b, targets, temperature, 3, entropy_gradient=True), (hidden, weight, bias))


def test_bfloat16_is_computed_in_float32_and_sums_its_weight_gradient_there() -> None:
    hidden, weight, _, targets, _ = _tensors(torch.bfloat16)
    chosen, _ = chunked_logprobs(hidden, weight, None, targets, None, 2, entropy_gradient=False)
    assert chosen.dtype is torch.float32
    chosen.sum().backward()
    plain = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    plain_logprobs(plain[0] @ plain[1].T, targets, None, entropy_gradient=False)[0].sum().backward()
    assert weight.grad is not None and weight.grad.dtype is torch.bfloat16
    torch.testing.assert_close(weight.grad.float(), plain[1].grad, atol=0.05, rtol=0.02)


class Largest(TorchDispatchMode):
    """Keeps the most elements that any tensor made inside had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.numel())
        return result


def test_the_matrix_of_tokens_by_vocabulary_is_never_whole_in_memory() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 8, generator=g).requires_grad_()
    weight, targets = torch.randn(1000, 8, generator=g).requires_grad_(), torch.randint(1000, (512,), generator=g)
    with Largest() as seen:
        chunked_logprobs(hidden, weight, None, targets, None, 16, entropy_gradient=True)[0].sum().backward()
    assert seen.elements == 16 * 1000
    with Largest() as whole:
        plain_logprobs(hidden @ weight.T, targets, None, entropy_gradient=True)[0].sum().backward()
    assert whole.elements == 512 * 1000


@pytest.mark.parametrize("fields", [{"head_rows": 3}, {"recompute": True}, {"head_rows": 3, "recompute": True}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_with_less_memory_has_the_gradient_of_a_plain_one(gpt2: Path, make_trajectories, fields: dict, temperature: float) -> None:
    found = []
    for model in ({}, fields):
        settings = {"model": {"dtype": "float64", **model}, "loss": {"entropy": 0.01}, "batch": {"token_budget": 60}}
        learner = Learner(gpt2, LearnerSettings.model_validate(settings))
        trajectories = make_trajectories((3, 2), transform=SamplingTransform(temperature=temperature))
        batch = build_batch(trajectories, {t.attempt: float(i) - 2 for i, t in enumerate(trajectories)}, 0)
        learner.accumulate(Minibatch(learner.cut(batch.sequences)), 0, Observations())
        found.append(torch.cat([p.grad.flatten() for p in learner.policy.parameters().values() if p.grad is not None]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-12


def test_recomputation_runs_each_layer_again_in_the_backward_pass_and_keeps_dropout_off(gpt2: Path, make_trajectories) -> None:
    counts = []
    for recompute in (False, True):
        learner = Learner(gpt2, LearnerSettings.model_validate({"model": {"recompute": recompute}}))
        calls: list[int] = []
        layer = learner.policy.model.transformer.h[0].attn.c_attn  # type: ignore[union-attr, index]
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        trajectories = make_trajectories((2,))
        batch = build_batch(trajectories, {t.attempt: 1.0 for t in trajectories}, 0)
        learner.accumulate(Minibatch(learner.cut(batch.sequences)), 0, Observations())
        counts.append(len(calls))
        assert not any(m.training for m in learner.policy.model.modules() if isinstance(m, torch.nn.Dropout))
    assert counts == [1, 2]
