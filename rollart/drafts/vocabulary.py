"""Which of a policy's tokens a draft head can propose: the frequent ones, since its output layer is most of its work. Reads no text itself."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from rollart.drafts.errors import DraftError

__all__ = ["frequent_tokens"]


def frequent_tokens(counts: Tensor, kept: int, always: Collection[int] = ()) -> Tensor:
    """The ids, ascending, of `kept` tokens: those in `always` (what ends a response), then the most frequent by `counts` [V], of equally frequent
    ones the smaller ids. DraftError if `always` alone are more, or `kept` is over the vocabulary."""
    if not len(set(always)) <= kept <= len(counts):
        raise DraftError(f"kept is {kept}; it has to be between {max(1, len(set(always)))} and the vocabulary of {len(counts)}")
    ranked = counts.to(torch.int64).clone()
    ranked[list(always)] = torch.iinfo(torch.int64).max
    return torch.sort(torch.sort(ranked, descending=True, stable=True).indices[:kept]).values
