"""The learner's side of log-probabilities that other workers computed: matches them to its own micro-batches, or refuses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rollart.training.batch import TrainSequence
from rollart.training.errors import LogprobsMismatch
from rollart.training.logprobs.table import Logprobs, LogprobTable, mark_of
from rollart.training.microbatch import MicroBatch
from storage.version import Version

__all__ = ["Given"]

Which = Literal["reference", "proximal"]


class Given:
    """What `parts`, from whichever workers, say of the batch of the step that starts from `version`; a rank takes out its own.

    A sequence is found by its trajectory's number and its segment's, and has to be the one that was looked at, token for token.
    LogprobsMismatch for parts that are for another step, say something twice, or disagree on which version the reference policy is.
    """

    def __init__(self, parts: Sequence[Logprobs], version: Version) -> None:
        self.version = version
        if other := next((p.version for p in parts if p.version != version), None):
            raise LogprobsMismatch(f"log-probabilities are given for the step from version {other}, and this one starts from {version}")
        self._tables = {
            "reference": _merged("reference", [p.reference for p in parts if p.reference is not None]),
            "proximal": _merged("proximal", [p.proximal for p in parts if p.proximal is not None], version),
        }

    def reference(self, sequences: Sequence[TrainSequence], micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probabilities [N] under the reference policy of the tokens of each of `micros`, which were cut from `sequences`; in the format
        and on the device of theirs. LogprobsMismatch."""
        return self._along("reference", sequences, micros)

    def proximal(self, sequences: Sequence[TrainSequence], micros: Sequence[MicroBatch]) -> list[Tensor]:
        """The same under the policy that the step starts from; there are none for its first minibatch."""
        return self._along("proximal", sequences, micros)

    def _along(self, which: Which, sequences: Sequence[TrainSequence], micros: Sequence[MicroBatch]) -> list[Tensor]:
        found = []
        for micro in micros:
            values = [self._of(which, sequences[i]) for i in micro.members]
            found.append(torch.cat(values).to(micro.behaviour) if values else micro.behaviour.new_zeros(len(micro.behaviour)))
        return found

    def _of(self, which: Which, sequence: TrainSequence) -> Tensor:
        where = f"{which} log-probabilities of segment {sequence.segment} of trajectory {sequence.trajectory} in the step from {self.version}"
        entry = self._tables[which].get((sequence.trajectory, sequence.segment))
        if entry is None:
            raise LogprobsMismatch(f"there are no {where}; the workers of stages.logprobs were given another batch")
        mark, values = entry
        if len(values) != len(sequence.positions) or mark != mark_of(sequence):
            raise LogprobsMismatch(
                f"the {where} are of other tokens ({len(values)} of them, and {len(sequence.positions)} are trained on); "
                "all workers have to run the same release on the same run's folder"
            )
        return values


def _merged(which: Which, tables: Sequence[LogprobTable], version: Version | None = None) -> dict[tuple[int, int], tuple[bytes, Tensor]]:
    """(Trajectory, segment) -> what was looked at, and its log-probabilities [n]."""
    if len(policies := {t.version for t in tables} | ({version} if version else set())) > 1:
        raise LogprobsMismatch(f"{which} log-probabilities are of several versions: {', '.join(map(str, sorted(policies)))}")
    found: dict[tuple[int, int], tuple[bytes, Tensor]] = {}
    for table in tables:
        values = torch.from_numpy(table.values.copy()).split(table.counts.tolist())  # a copy, since what Dask receives can't be written to
        for (trajectory, segment), mark, part in zip(table.keys.tolist(), table.marks, values, strict=True):
            if (trajectory, segment) in found:
                raise LogprobsMismatch(f"{which} log-probabilities of segment {segment} of trajectory {trajectory} are given twice")
            found[trajectory, segment] = mark.tobytes(), part
    return found
