"""Draws tokens from logits; owns the random numbers, which belong to (seed, position) and to nothing else in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.engines.embedded.cuts import left_out

__all__ = ["RowTransforms", "choose", "draw", "sample", "transformed_logprobs", "uniforms"]

_IN_CACHE = 400_000
"""Numbers that a CPU sums up at once: measured, five times as many take thirty times as long, in memory that is mapped anew for each of them."""

_BLOCK = 256
"""Tokens whose probabilities are summed up together, in fp64."""

_SMALL = 2048
"""A vocabulary up to this is summed up token by token, which is one operation."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64], stream: int = 0) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), one a row, each a function of (seed, position, stream) alone. All arrays have shape [R].

    `position` is the token's place in the whole sequence, so a response that goes on elsewhere after an abort draws what
    it would have drawn. `stream` separates several draws at one position.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN + np.uint64(stream) * np.uint64(0xD1342543DE82EF95))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class RowTransforms:
    """The sampling transform of each row; every array has shape [R]. Values as in `SamplingTransform`."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    min_p: npt.NDArray[np.float32]

    @property
    def cuts(self) -> bool:
        """Whether any row leaves part of the vocabulary out."""
        return bool((self.top_p < 1.0).any() or (self.top_k > 0).any() or (self.min_p > 0.0).any())


def _cut(scaled: Tensor, rows: RowTransforms) -> Tensor:
    """Sets what top-k, then top-p, then min-p leave out to -inf. [R, V] -> [R, V]."""
    device, vocabulary = scaled.device, scaled.shape[-1]
    cuts = np.flatnonzero((rows.top_p < 1.0) | (rows.top_k > 0) | (rows.min_p > 0.0))
    k = np.where(rows.top_k > 0, np.minimum(rows.top_k, vocabulary), vocabulary)[cuts]
    bounds = [torch.from_numpy(bound).to(device) for bound in (k, rows.top_p[cuts].astype(np.float64), rows.min_p[cuts].astype(np.float64))]
    if len(cuts) == len(scaled):
        return scaled.masked_fill(left_out(scaled, *bounds), -torch.inf)
    at = torch.from_numpy(cuts).to(device)
    some = scaled[at]
    return scaled.index_copy(0, at, some.masked_fill(left_out(some, *bounds), -torch.inf))


def transformed_logprobs(logits: Tensor, rows: RowTransforms) -> Tensor:
    """Natural log-probabilities of the distribution that rows are sampled from, fp32 [R, V].

    log_softmax(logits / T) over what the cuts keep. A greedy row (T = 0) has no such distribution: it reports log_softmax(logits).
    """
    scaled = logits.float()
    if (rows.temperature != 1.0).any():
        t = np.where(rows.temperature > 0.0, rows.temperature, np.float32(1.0))
        scaled = scaled / torch.from_numpy(t).to(logits.device).unsqueeze(1)
    if rows.cuts:
        scaled = _cut(scaled, rows)
    return scaled.log_softmax(-1)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """One token a row by inversion of the cumulative distribution at `uniform` fp64 [R] in [0, 1). `logprobs` [R, V] need not be normalised."""
    rows = max(_IN_CACHE // logprobs.shape[-1], 1)
    if logprobs.device.type == "cpu" and len(logprobs) > rows:
        return torch.cat([draw(*piece) for piece in zip(logprobs.split(rows), uniform.split(rows), strict=True)])
    count, vocabulary = logprobs.shape
    if vocabulary <= _SMALL:
        cumulative = logprobs.double().exp().cumsum(-1)
        # At most (1 - 2^-53) * total, which no rounding lifts onto the total: so the token found has probability.
        return torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # Sums of blocks first, then of the tokens in the block that it is: a cumulative sum over a whole vocabulary takes ten times as long.
    p = logprobs.new_zeros((count, -(-vocabulary // _BLOCK) * _BLOCK))
    torch.exp(logprobs, out=p[:, :vocabulary])
    p = p.view(count, -1, _BLOCK)
    cumulative = p.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    block = torch.searchsorted(cumulative, target, right=True)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_min(0)), 0.0)
    inner = p[torch.arange(count, device=p.device), block.squeeze(1)].double().cumsum(-1)
    # Added up one by one, a block may come to a little less than its sum: then it is its last token that has probability.
    rest = torch.minimum(target - before, torch.nextafter(inner[:, -1:], torch.zeros_like(inner[:, -1:])))
    return (block * _BLOCK + torch.searchsorted(inner, rest, right=True)).squeeze(1)


def sample(logits: Tensor, rows: RowTransforms, uniform: npt.NDArray[np.float64]) -> tuple[Tensor, Tensor]:
    """One token a row by inversion of the cumulative distribution at `uniform` [R]; greedy where T = 0.

    `logits` is [R, V]; returns ids int64 [R] and their log-probabilities fp32 [R].
    """
    logprobs = transformed_logprobs(logits, rows)
    ids = choose(logits, logprobs, rows, uniform)
    return ids, logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)


def choose(logits: Tensor, logprobs: Tensor, rows: RowTransforms, uniform: npt.NDArray[np.float64]) -> Tensor:
    """The ids [R] of `sample`, where the `logprobs` [R, V] are known already."""
    greedy = rows.temperature == 0.0
    if greedy.all():
        return logits.argmax(-1)
    ids = draw(logprobs, torch.from_numpy(uniform).to(logits.device))
    return torch.where(torch.from_numpy(greedy).to(logits.device), logits.argmax(-1), ids) if greedy.any() else ids
