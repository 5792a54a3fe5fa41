"""Log-probabilities and entropies out of the output layer, in chunks of tokens: the tokens-by-vocabulary matrix is never whole in memory.

Computes what `log_softmax(hidden @ weight.T / temperature)` would say of the targets, over the ids that a cut kept where there is one; knows
no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollart.training.cut import Cut

__all__ = ["chunked_logprobs", "plain_logprobs"]


def plain_logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, cut: Cut | None = None, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Of `logits` [N, V]: log-probabilities of `targets` [N] under softmax(logits / temperature) over what `cut` kept, and the entropies of that
    distribution, both [N], in nats."""
    if temperature is not None:
        logits = logits / temperature.unsqueeze(1)
    left_out = None if cut is None else cut.left_out(logits.shape[-1])
    if left_out is not None:
        logits = logits.masked_fill(left_out, -torch.inf)
    log_p = torch.log_softmax(logits, dim=-1)
    seen = log_p if entropy_gradient else log_p.detach()
    p = seen.exp()
    if left_out is not None:
        seen = seen.masked_fill(left_out, 0.0)  # p log p is 0 where p is
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(p * seen).sum(-1)


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor | None, rows: int, cut: Cut | None = None, *,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same from `hidden` [N, H] and the output layer's `weight` [V, H], `bias` [V], with logits of `rows` tokens at a time.

    Computed in float32 at least. The logits are computed again in the backward pass: a third more work in the output layer.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    scale = torch.ones(len(hidden), dtype=wide, device=hidden.device) if temperature is None else temperature.to(wide)
    chosen, entropy = _Chunked.apply(hidden, weight, bias, targets, scale, rows, cut, entropy_gradient)
    return chosen, entropy if entropy_gradient else entropy.detach()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, rows: int, cut: Cut | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        chosen, entropy, norm = (torch.empty_like(temperature) for _ in range(3))  # [N]
        for part, kept in _parts(len(hidden), rows, cut):
            log_p, left_out = _scaled_logits(hidden[part], weight, bias, temperature[part], kept)
            norm[part] = torch.logsumexp(log_p, dim=-1)
            log_p -= norm[part].unsqueeze(1)
            chosen[part] = log_p.gather(1, targets[part].unsqueeze(1)).squeeze(1)
            p = log_p.exp()
            entropy[part] = -p.mul_(_without(log_p, left_out)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropy, norm)
        ctx.rows, ctx.cut, ctx.entropy_gradient = rows, cut, entropy_gradient
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, entropy, norm = ctx.saved_tensors
        of_chosen, of_entropy = gradients
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=temperature.dtype) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=temperature.dtype) if wants_bias and bias is not None else None
        for part, kept in _parts(len(hidden), ctx.rows, ctx.cut):
            # One matrix of rows by vocabulary, changed in place: what this is for is memory.
            log_p, left_out = _scaled_logits(hidden[part], weight, bias, temperature[part], kept)
            log_p -= norm[part].unsqueeze(1)
            # d log p_target / d logit_j = 1[j = target] - p_j;  d H / d logit_j = -p_j (log p_j + H); both over the temperature.
            if ctx.entropy_gradient:
                p = log_p.exp()
                log_p = _without(log_p, left_out)
                slope = log_p.add_(entropy[part].unsqueeze(1)).mul_(of_entropy[part].unsqueeze(1)).add_(of_chosen[part].unsqueeze(1)).mul_(p).neg_()
            else:
                slope = log_p.exp_().mul_(-of_chosen[part].unsqueeze(1))
            slope.scatter_add_(1, targets[part].unsqueeze(1), of_chosen[part].unsqueeze(1))
            slope /= temperature[part].unsqueeze(1)
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[part] = slope @ weight
            if to_weight is not None and to_weight.dtype == slope.dtype:
                to_weight.addmm_(slope.T, hidden[part])  # in place: the product alone would be as large as the weight
            elif to_weight is not None:
                to_weight += slope.T @ hidden[part]
        return (
            to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None if to_bias is None else to_bias.to(bias.dtype),
            None, None, None, None, None,
        )  # fmt: skip


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, cut: Cut | None) -> tuple[Tensor, Tensor | None]:
    """Logits over their temperature, [N, V], of which the caller may dispose, -inf where `cut` left them out; and where that is."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(temperature.dtype).div_(temperature.unsqueeze(1))
    if cut is None:
        return logits, None
    left_out = cut.left_out(logits.shape[-1])
    return logits.masked_fill_(left_out, -torch.inf), left_out


def _without(log_p: Tensor, left_out: Tensor | None) -> Tensor:
    """`log_p` with 0, in place, where nothing was kept: p log p is 0 where p is."""
    return log_p if left_out is None else log_p.masked_fill_(left_out, 0.0)


def _parts(count: int, rows: int, cut: Cut | None) -> list[tuple[slice, Cut | None]]:
    parts = [slice(at, min(at + rows, count)) for at in range(0, count, rows)]
    return list(zip(parts, [None] * len(parts) if cut is None else cut.parts(rows), strict=True))
