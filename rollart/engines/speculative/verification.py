"""Which drafted tokens stand, and what is sampled after them; owns the rule that keeps the distribution, knows nothing of drafts' making.

Rejection sampling as of Leviathan et al. (2023, arXiv 2211.17192) and Chen et al. (2023, arXiv 2302.01318): a token drawn from q stands with
probability min(1, p / q); in place of the first that doesn't, one is drawn from the normalised positive part of p - q. p is what a request is
sampled from, its temperature and cuts applied.

For a draft that is certain (q a point mass on d) this is the same as to draw x from p and to accept d if x = d: p(d) of the time it stands,
and otherwise x is distributed as p without d. Here it is done that way, with the random number that plain sampling would use at that place. So the
tokens are those that plain sampling draws, whatever was drafted, even where the draft has seen what the same seed sampled before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.engines.embedded.sampling import RowTransforms, choose, draw, transformed_logprobs, uniforms
from rollart.engines.speculative.draft import Ints, Proposal

Flags = npt.NDArray[np.bool_]

__all__ = ["ACCEPT_STREAM", "DRAFT_STREAM", "Verdict", "accepts", "decide", "verify"]

ACCEPT_STREAM, DRAFT_STREAM = 1, 2
"""The streams of random numbers for acceptance and for what a draft draws; stream 0 is for what is sampled."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Row r's tokens are `ids[r, : accepted[r] + 1]` of [R, K + 1]: what stands of the draft, and one more. `logprobs` are theirs under p.
    `kept` holds for each row that wants it the ids that p is over at each of these tokens, ascending, and None for the others."""

    ids: Ints
    logprobs: npt.NDArray[np.float32]
    accepted: Ints
    kept: list[list[npt.NDArray[np.int32]] | None] | None = None


def accepts(p: Tensor, q: Tensor, uniform: Tensor) -> Tensor:
    """Whether tokens of probability `p` that were drawn with probability `q` stand, for numbers in [0, 1): true with probability min(1, p / q).

    A token without probability never stands, also where q has none either.
    """
    return uniform * q.double() < p.double()


def verify(
    logits: Tensor, proposal: Proposal, rows: RowTransforms, seeds: npt.NDArray[np.uint64], positions: Ints, keeps: Flags | None = None
) -> Verdict:
    """Judges a proposal by the policy's `logits` [M, V]: those before each drafted token and after the last, request after request.

    So M is the sum of `lengths` + 1. `positions` [R] are the places of the first drafted tokens in the whole sequences, `keeps` [R] says of
    which requests the kept ids are wanted.
    """
    owners, places = _packed(proposal.lengths)
    at = (positions[owners] + places).astype(np.uint64)
    of = seeds[owners]
    return decide(logits, proposal, rows, uniforms(of, at), uniforms(of, at, ACCEPT_STREAM) if proposal.drawn.any() else None, keeps)


def decide(
    logits: Tensor, proposal: Proposal, rows: RowTransforms, sampling: npt.NDArray[np.float64], accepting: npt.NDArray[np.float64] | None,
    keeps: Flags | None = None,
) -> Verdict:  # fmt: skip
    """`verify` with the random numbers given, both [M]; `accepting` is needed for proposals that were drawn."""
    lengths = proposal.lengths
    owners, places = _packed(lengths)
    each = RowTransforms(rows.temperature[owners], rows.top_p[owners], rows.top_k[owners], rows.min_p[owners])
    logprobs = transformed_logprobs(logits, each)
    ids = choose(logits, logprobs, each, sampling)
    drafts = np.flatnonzero(places < lengths[owners])  # the packed rows that have a drafted token
    drafted = proposal.ids[owners[drafts], places[drafts]]
    stands = ids.cpu().numpy()[drafts] == drafted
    drawn = (proposal.drawn[owners] & (each.temperature > 0.0))[drafts]
    q = proposal.q
    if drawn.any():
        if q is None or accepting is None:
            raise ValueError("a proposal that was drawn needs its probabilities q, and random numbers for acceptance")
        at, of, place, token = (_on(logits, a[drawn]) for a in (drafts, owners[drafts], places[drafts], drafted))
        stands[drawn] = accepts(logprobs[at, token].exp(), q[of, place, token], _on(logits, accepting)[at]).cpu().numpy()
    table = np.zeros((len(lengths), int(lengths.max(initial=0)) + 1), dtype=bool)
    table[owners[drafts], places[drafts]] = stands
    accepted = np.cumprod(table, axis=1).sum(1)
    if drawn.any() and q is not None:
        kept = drawn & (places[drafts] < accepted[owners[drafts]])
        ids[_on(logits, drafts[kept])] = _on(logits, drafted[kept])
        refused = np.flatnonzero(proposal.drawn & (rows.temperature > 0.0) & (accepted < lengths))
        if len(refused):
            at = _on(logits, (np.cumsum(lengths + 1) - lengths - 1 + accepted)[refused])
            left = _left_over(logprobs[at], q[_on(logits, refused), _on(logits, accepted[refused])])
            ids[at] = draw(left, _on(logits, sampling)[at])
    values = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    tokens, known = np.zeros(table.shape, dtype=np.int64), np.zeros(table.shape, dtype=np.float32)
    tokens[owners, places], known[owners, places] = ids.cpu().numpy(), values.cpu().numpy()
    kept = None if keeps is None or not keeps.any() else _kept(logprobs, accepted, lengths, keeps)
    return Verdict(tokens, known, accepted, kept)


def _kept(logprobs: Tensor, accepted: Ints, lengths: Ints, keeps: Flags) -> list[list[npt.NDArray[np.int32]] | None]:
    """`Verdict.kept`: what has a probability in the packed rows of the tokens that count, of the requests that want it."""
    owners, places = _packed(lengths)
    wanted = np.flatnonzero(keeps[owners] & (places <= accepted[owners]))
    at = _on(logprobs, wanted)
    stays = logprobs[at] > -torch.inf
    ids = stays.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    each = iter(np.split(ids, stays.sum(-1).cumsum(0)[:-1].cpu().numpy()))
    return [[next(each) for _ in range(n + 1)] if keep else None for n, keep in zip(accepted.tolist(), keeps.tolist(), strict=True)]


def _on(logits: Tensor, array: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).to(logits.device)


def _left_over(logprobs: Tensor, q: Tensor) -> Tensor:
    """The logarithm of max(p - q, 0), not normalised, fp64 [R, V]; that of p where rounding left nothing over (then p and q are equal)."""
    p = logprobs.exp().double()  # rounded as where it is compared with q, so that equal ones leave nothing
    rest = (p - q.double()).clamp_min(0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, p).log()


def _packed(lengths: Ints) -> tuple[Ints, Ints]:
    """Of each packed row: the request that it belongs to, and its place among that request's."""
    owners = np.repeat(np.arange(len(lengths)), lengths + 1)
    return owners, np.arange(len(owners)) - np.repeat(np.cumsum(lengths + 1) - lengths - 1, lengths + 1)
