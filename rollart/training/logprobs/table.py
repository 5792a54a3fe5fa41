"""Log-probabilities of trained tokens as they travel from worker to worker: flat, by sequence. Knows no model and no store."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollart.training.batch import TrainSequence
from storage.version import Version

__all__ = ["LogprobTable", "Logprobs", "mark_of"]

_MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Of some of a batch's sequences, under one policy, that of `version`: `values` [N] in nats, sequence after sequence.

    `keys` [S, 2] are the trajectory's number in the batch and the segment's in the trajectory, `counts` [S] its trained tokens, and
    `marks` [S, 16] bytes that say what was looked at (`mark_of`).
    """

    version: Version
    keys: NDArray[np.int64]
    counts: NDArray[np.int64]
    marks: NDArray[np.uint8]
    values: NDArray[np.floating[Any]]

    @classmethod
    def of(cls, version: Version, sequences: Sequence[TrainSequence], values: Sequence[Tensor]) -> LogprobTable:
        """The table of `sequences`, each with its log-probabilities [n]."""
        return cls(
            version,
            np.array([(s.trajectory, s.segment) for s in sequences], dtype=np.int64).reshape(-1, 2),
            np.array([len(v) for v in values], dtype=np.int64),
            np.frombuffer(b"".join(map(mark_of, sequences)), dtype=np.uint8).reshape(-1, _MARK_BYTES),
            np.concatenate([v.cpu().numpy() for v in values]) if values else np.empty(0),
        )

    def __sizeof__(self) -> int:
        return int(self.keys.nbytes + self.counts.nbytes + self.marks.nbytes + self.values.nbytes)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What one share of a batch came to, for the step from `version`: under the `reference` policy, of all of its sequences, and under the
    `proximal` one, of those beyond the first minibatch; None where a step needs none."""

    version: Version
    reference: LogprobTable | None
    proximal: LogprobTable | None

    def __sizeof__(self) -> int:
        return sum(t.__sizeof__() for t in (self.reference, self.proximal) if t is not None)


def mark_of(sequence: TrainSequence) -> bytes:
    """A digest of all that log-probabilities of a sequence depend on beside the policy: ids, trained positions, temperature, kept sets."""
    digest = hashlib.blake2b(struct.pack("<qd", len(sequence.ids), sequence.temperature), digest_size=_MARK_BYTES)
    cut = () if sequence.cut is None else (sequence.cut.counts, sequence.cut.ids)
    for part in (sequence.ids, sequence.positions, *cut):
        digest.update(part.numpy().tobytes())
    return digest.digest()
