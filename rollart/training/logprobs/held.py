"""A policy that takes over published versions of the weights; waits for one that is on its way. Trains nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rollart.training.batch import TrainSequence
from rollart.training.errors import LogprobsError
from rollart.training.microbatch import micro_batches
from rollart.training.policy import Policy
from rollart.training.settings import BatchSettings
from rollart.training.state import check_fits, fill, own_tensors
from storage.errors import VersionMissing
from storage.models.adapters import Whole
from storage.version import Version
from storage.weights import WeightStore

__all__ = ["HeldPolicy"]

log = logging.getLogger(__name__)

_POLL_S = 0.1
"""Between two looks at whether a version exists: what is waited for is published within seconds."""


class HeldPolicy:
    """`policy` with the weights of the version of `store` that was asked for last. One thread at a time."""

    def __init__(self, policy: Policy, store: WeightStore) -> None:
        self._policy, self._store = policy, store
        self._version: Version | None = None

    def take(self, version: Version, wait_s: float, ended: threading.Event) -> None:
        """Takes over `version` as soon as it exists, in place, reading only what changed where the store has that.

        LogprobsError after `wait_s` seconds, or once `ended` is set; StateError if it is another model's; StoreError.
        """
        if version == self._version:
            return
        self._await(version, wait_s, ended)
        model, held = self._policy.model, self._version
        self._version = None  # whatever goes wrong meanwhile leaves nothing that can be gone on from
        whole = Whole(self._store, version)
        if whole.adapter is None:
            own = {name: tensor.detach() for name, tensor in own_tensors(model).items()}
            check_fits(model, self._store.pull(version, out=own, base=held))
        else:
            fill(model, whole.pull())
        self._version = version

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence], settings: BatchSettings) -> list[Tensor]:
        """Log-probabilities [n] of the trained tokens of each sequence, on the CPU, in the policy's `compute_dtype`."""
        found: dict[int, Tensor] = {}
        for micro in micro_batches(sequences, settings, packed=self._policy.packs):
            values = self._policy.logprobs(micro.to(self._policy.device, self._policy.compute_dtype))[0].cpu()
            found |= dict(zip(micro.members, values.split([len(sequences[i].positions) for i in micro.members]), strict=True))
        return [found[i] for i in range(len(sequences))]

    def _await(self, version: Version, wait_s: float, ended: threading.Event) -> None:
        until = time.monotonic() + wait_s
        while True:
            try:
                self._store.commit(version)
                return
            except VersionMissing as error:
                if time.monotonic() >= until:
                    raise LogprobsError(
                        f"version {version} has not come to {self._store.url} within {wait_s:g} seconds; see what became of its publication"
                    ) from error
            if ended.wait(_POLL_S):
                raise LogprobsError(f"the wait for version {version} was given up, since the run ended")
