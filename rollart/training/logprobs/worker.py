"""Puts the reference and the proximal policy in a worker that trains nothing, and asks them by Dask tasks; decides nothing.

Any worker of the stage's class can take any share, and take it again: what a share comes to follows from the batch and published versions.
Torch is imported in the worker alone: a scheduler imports this module too, to read the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import Worker, WorkerPlugin, get_worker

from rollart.training.errors import LogprobsError
from rollart.training.settings import LearnerSettings
from rollart.training.shares import TrajectoryReader, minibatch_of
from rollart.types import Batch
from storage.version import Version

if TYPE_CHECKING:
    from rollart.training.logprobs.held import HeldPolicy
    from rollart.training.logprobs.table import Logprobs

__all__ = ["PLUGIN", "REFERENCE_TAG", "LogprobPlugin", "LogprobShare", "logprobs_task"]

PLUGIN = "logprobs"

REFERENCE_TAG = "reference"
"""The tag that keeps the version that training began from, however many come after it."""


@dataclass(frozen=True, slots=True)
class LogprobShare:
    """Share `rank` of `count` of what `batch` is to be trained on; `reference` is the version of the reference policy."""

    batch: Batch
    rank: int
    count: int
    reference: Version


class LogprobPlugin(WorkerPlugin):
    """Owns those of the two policies that a step of `settings` needs, made from the model in `folder` in a thread while the worker starts.

    Their weights come from the versions at `weights_url`; the reference's once, the proximal's for each step, which is waited for up to
    `wait_s` seconds.
    """

    name = PLUGIN

    def __init__(
        self, folder: str, settings: LearnerSettings, read: TrajectoryReader, *, weights_url: str,
        storage_options: Mapping[str, Any] | None = None, wait_s: float = 900.0,
    ) -> None:  # fmt: skip
        self.folder, self.settings, self.read = folder, settings, read
        self.weights_url, self.storage_options, self.wait_s = weights_url, storage_options, wait_s

    def setup(self, worker: Worker) -> None:
        """Starts to build the policies; an error of it is raised by the first task that needs them."""
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._tagged: Version | None = None
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="build-logprobs")
        self._built: Future[tuple[HeldPolicy | None, HeldPolicy | None]] = self._builder.submit(self._build)

    def teardown(self, worker: Worker) -> None:
        self._ended.set()
        self._builder.shutdown(wait=False, cancel_futures=True)

    def compute(self, share: LogprobShare) -> Logprobs:
        """The log-probabilities of a share. LogprobsError, BatchError, TransformError, StateError, StoreError."""
        import torch

        from rollart.training.batch_share import train_share
        from rollart.training.logprobs.table import Logprobs, LogprobTable

        batch, settings = share.batch, self.settings.batch
        sequences = train_share(batch, self.settings, self.read, share).sequences
        version = Version(batch.lineage, batch.step)
        reference, proximal = self._built.result()
        found: dict[str, LogprobTable | None] = {"reference": None, "proximal": None}
        with self._turn:  # a policy is held once, however many tasks the worker may run
            torch.set_num_threads(self.settings.model.threads)
            if reference is not None:  # first, since the other one's version may be on its way
                reference.take(share.reference, self.wait_s, self._ended)
                self._keep(share.reference)
                found["reference"] = LogprobTable.of(share.reference, sequences, reference.logprobs(sequences, settings))
            if proximal is not None:
                part = minibatch_of(batch.members, settings.minibatches)
                later = [s for s in sequences if part[s.trajectory]]
                proximal.take(version, self.wait_s, self._ended)
                found["proximal"] = LogprobTable.of(version, later, proximal.logprobs(later, settings))
        return Logprobs(version, **found)

    def _keep(self, reference: Version) -> None:
        """Tags the reference's version, so that a resumed run and a worker that comes late find it, however old it is by then."""
        if self._tagged != reference:
            self._store().tag(REFERENCE_TAG, reference)
            self._tagged = reference

    def _build(self) -> tuple[HeldPolicy | None, HeldPolicy | None]:
        from rollart.training.logprobs.held import HeldPolicy
        from rollart.training.policy import Policy, load_model
        from storage.models.folders import local_folder

        folder = local_folder(self.folder, self.storage_options)

        def held(needed: bool) -> HeldPolicy | None:
            if not needed:
                return None
            model = load_model(folder, self.settings.model).requires_grad_(False)
            return HeldPolicy(Policy(model, head_rows=self.settings.model.head_rows, packing=self.settings.batch.packing), self._store())

        return held(self.settings.needs_reference), held(self.settings.needs_proximal)

    def _store(self) -> Any:
        from storage.weights import WeightStore

        return WeightStore(self.weights_url, self.storage_options)


def logprobs_task(share: LogprobShare) -> Logprobs:
    """Computes a share on the worker that this runs on; its result stays there until training tasks fetch it."""
    plugin = get_worker().plugins.get(PLUGIN)
    if not isinstance(plugin, LogprobPlugin):
        raise LogprobsError("this worker has no policies to ask; LogprobPlugin has to be registered on the workers of stages.logprobs")
    return plugin.compute(share)
