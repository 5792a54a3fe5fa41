"""What cuts of the sampling distribution kept, as tensors, and which logits they leave out; computes no probability.

Top-k and top-p leave tokens out by the policy that samples. A trainer that let them back in would compare distributions over different
tokens: no importance weight is defined there. So the sets stay as they were sampled, under whichever policy: the "keep sampling mask"
of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.kept import KeptSets

__all__ = ["Cut"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Of N tokens: `counts` [N] ids each that were kept there (0: all), one token's after the other's in `ids`, int32 [K]."""

    ids: Tensor
    counts: Tensor

    @classmethod
    def of(cls, kept: KeptSets) -> Cut:
        """Of stored sets."""
        return cls(torch.tensor(kept.ids, dtype=torch.int32), torch.tensor(kept.counts, dtype=torch.long))

    @classmethod
    def joined(cls, parts: Sequence[tuple[Cut | None, int]]) -> Cut | None:
        """One after the other's; a part without a cut stands for that many tokens of which all is kept. None if no part has one."""
        cuts = [cut for cut, _ in parts if cut is not None]
        if not cuts:
            return None
        counts = [torch.zeros(n, dtype=torch.long) if cut is None else cut.counts for cut, n in parts]
        return cls(torch.cat([cut.ids for cut in cuts]), torch.cat(counts))

    def only(self, chosen: Tensor) -> Cut:
        """Of the tokens that `chosen` [N] (bool) names."""
        return Cut(self.ids[chosen.repeat_interleave(self.counts)], self.counts[chosen])

    def to(self, device: torch.device) -> Cut:
        """The same on `device`."""
        return Cut(self.ids.to(device), self.counts.to(device))

    def parts(self, rows: int) -> list[Cut]:
        """Of `rows` tokens at a time."""
        counts = self.counts.split(rows)
        return [Cut(ids, of) for ids, of in zip(self.ids.split([int(c.sum()) for c in counts]), counts, strict=True)]

    def left_out(self, vocabulary: int) -> Tensor:
        """Which of `vocabulary` ids were not kept, bool [N, V]."""
        found = (self.counts > 0).unsqueeze(1).repeat(1, vocabulary)
        found[torch.arange(len(self.counts), device=self.ids.device).repeat_interleave(self.counts), self.ids.long()] = False
        return found
