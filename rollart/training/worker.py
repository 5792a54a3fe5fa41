"""Puts a learner in a training worker and drives it by Dask tasks; owns which version is held, not when anything runs.

The tasks are to be pinned to the worker that has the plugin (`workers=[address], allow_other_workers=False, pure=False`).
Publishing and saving work on copies that were made when the version came to be, so they can run beside the next training step.
Torch is imported in the worker alone: a scheduler imports this module too, to read the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from distributed import Worker, WorkerPlugin, get_worker

from rollart.fence import admit
from rollart.training.errors import StateError
from rollart.training.keeping import Keeping
from rollart.training.metrics import StepMetrics, SupervisedMetrics
from rollart.training.resumed import Resumed
from rollart.training.seat import Seat
from rollart.training.settings import LearnerSettings, OptimiserSettings
from rollart.training.shares import TrajectoryReader
from rollart.types import Batch, Receipt, Segment
from storage.version import Version

if TYPE_CHECKING:
    from torch import Tensor

    from rollart.drafts.head import DraftHead
    from rollart.training.learner import Learner
    from rollart.training.logprobs.table import Logprobs
    from storage.checkpoints import Checkpoint, CheckpointStore
    from storage.weights import WeightStore

__all__ = [
    "PLUGIN", "LearnerPlugin", "Resumed", "TrajectoryReader", "begin_task", "checkpoint_task", "collect_task", "fenced_task",
    "learner_plugin", "load_checkpoint_task",
    "load_weights_task", "publish_task", "supervised_task", "train_task",
]  # fmt: skip

T = TypeVar("T")

PLUGIN = "learner"

_KEPT = 2
"""How many versions' copies wait to be published: the newest, and the one that may be on its way while the next step ends."""

_DOCUMENT = "learner"


class LearnerPlugin(WorkerPlugin):
    """Owns the learner of a training worker, made from the model in `folder` in a thread while the worker starts.

    `weights_url` and `checkpoints_url` are where versions and checkpoints go, opened with `storage_options`. At least every
    `full_every`-th version is whole, those between are stored as what changed. With `elsewhere`, other workers compute log-probabilities
    under the reference and the proximal policy, and each step is given them. It does what `coordinator` asks, and nobody else.
    Versions of a draft head that is trained here go to `drafts_url`.
    """

    name = PLUGIN

    def __init__(
        self, folder: str, settings: LearnerSettings, read: TrajectoryReader, *, weights_url: str, checkpoints_url: str,
        storage_options: Mapping[str, Any] | None = None, full_every: int = 1, elsewhere: bool = False, coordinator: int = 0,
        drafts_url: str = "",
    ) -> None:  # fmt: skip
        self.folder, self.settings, self.read = folder, settings, read
        self.weights_url, self.checkpoints_url, self.storage_options = weights_url, checkpoints_url, storage_options
        self.full_every, self.elsewhere, self.coordinator, self.drafts_url = full_every, elsewhere, coordinator, drafts_url

    def setup(self, worker: Worker) -> None:
        """Starts to build the learner; an error of it is raised by the first task that needs it."""
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="build-learner")
        self._built: Future[Learner] = self._builder.submit(_build, self.folder, self.storage_options, self.settings, self.elsewhere)
        self.seat = Seat()
        self._last: tuple[int, StepMetrics] | None = None  # lineage and metrics of the last training step
        self._snapshots: dict[Version, dict[str, Tensor]] = {}
        self._base: str | None = None  # digest of what the adapters are trained on, once it is in the store
        self._states: dict[Version, tuple[dict[str, Tensor], dict[str, Any]]] = {}

    def teardown(self, worker: Worker) -> None:
        self.seat.leave()
        self._builder.shutdown(wait=False, cancel_futures=True)

    @property
    def learner(self) -> Learner:
        return self._built.result()

    @cached_property
    def weights(self) -> WeightStore:
        from storage.weights import WeightStore

        return WeightStore(self.weights_url, self.storage_options, full_every=self.full_every)

    @cached_property
    def drafts(self) -> WeightStore:
        from storage.weights import WeightStore

        return WeightStore(self.drafts_url, self.storage_options)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The model's config and tokenizer, which go with each version, so that it can be used without its run."""
        from storage.models.folders import local_folder, model_files

        return model_files(local_folder(self.folder, self.storage_options))

    def described(self, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """What goes with a version beside its tensors: metadata and files. The base of adapters is put into the store before the first."""
        if not self.settings.model.publishes_adapters:
            return dict(metadata), self.files
        from rollart.training.lora import adapter_config, base, described
        from storage.models.adapters import CONFIG_FILE, publish_base

        model = self.learner.policy.model
        if self._base is None:
            self._base = publish_base(self.weights, base(model), self.files)
        return {**metadata, **described(model, self._base).document()}, {**self.files, CONFIG_FILE: adapter_config(model)}

    @cached_property
    def checkpoints(self) -> CheckpointStore:
        from storage.checkpoints import CheckpointStore

        return CheckpointStore(self.checkpoints_url, self.storage_options)

    def train(self, batch: Batch, keep_state: bool, given: Sequence[Logprobs] = ()) -> StepMetrics:
        from rollart.training.batch_share import train_share
        from rollart.training.logprobs.given import Given
        from rollart.training.rescoring import rescored

        learner = self.learner
        told = Given(given, Version(batch.lineage, batch.step)) if self.elsewhere else None
        share = train_share(batch, self.settings, self.read, learner.ranks)
        with learner.lock:
            if self._last is not None and (self._last[0], self._last[1].step) == (batch.lineage, batch.step):
                return self._last[1]  # Dask runs a task again when it lost the result; the batch was trained on
            metrics = learner.train_step(share, told, rescored(learner, share, batch.lineage, self.weights))
            made = Version(batch.lineage, learner.step)
            self._last = (batch.lineage, metrics)
            self._keep(made, keep_state)
            return metrics

    def snapshot(self, version: Version) -> dict[str, Tensor]:
        """What `version` holds, whole weights or adapters; StateError if it is neither a kept one nor the present one."""
        with self.learner.lock:
            if version not in self._snapshots:
                self._only_at(version)
                self._snapshots[version] = self._taken()
            return self._snapshots[version]

    def state(self, version: Version) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The learner's state at `version`; StateError if it was not kept and is not the present one."""
        with self.learner.lock:
            if version in self._states:
                return self._states[version]
            self._only_at(version)
            return self.learner.state()

    def checkpoint(self, version: Version | None) -> Checkpoint:
        """A checkpoint (default: the newest), of whose tensors only those parts are read that this rank is to hold."""
        if not self.learner.sharded:
            return self.checkpoints.load(version)
        from rollart.training.sharding import cuts

        found = self.checkpoints.resolve(version)
        return self.checkpoints.load(found, slices=cuts(self.learner, self.checkpoints.commit(found).tensors))

    def forget(self) -> None:
        """Drops all copies, once the learner holds something that did not come of them."""
        self._last = self._base = None
        self._snapshots.clear()
        self._states.clear()

    def _keep(self, version: Version, keep_state: bool) -> None:
        self._snapshots[version] = self._taken()
        for old in sorted(self._snapshots)[:-_KEPT]:
            del self._snapshots[old]
        self._states = {version: self.learner.state()} if keep_state else self._states

    def _taken(self) -> dict[str, Tensor]:
        return self.learner.adapters() if self.settings.model.publishes_adapters else self.learner.weights()

    def _only_at(self, version: Version) -> None:
        if self.learner.step != version.step:
            raise StateError(
                f"version {version} is asked for, but the learner is at step {self.learner.step} and keeps copies of "
                f"{', '.join(map(str, sorted(self._snapshots))) or 'none'}; "
                "publish each version before the second step after it, and train with keep_state where a checkpoint is due"
            )


def _build(folder: str, storage_options: Mapping[str, Any] | None, settings: LearnerSettings, elsewhere: bool) -> Learner:
    from rollart.training.learner import Learner
    from storage.models.folders import local_folder

    head = _given_head(settings, storage_options) if settings.draft.online else None
    return Learner(local_folder(folder, storage_options), settings, elsewhere=elsewhere, head=head)


def _given_head(settings: LearnerSettings, storage_options: Mapping[str, Any] | None) -> DraftHead | None:
    if settings.draft.model is None:
        return None
    from rollart.drafts.folder import load_head
    from storage.models.model import Model

    with Model(settings.draft.model, dict(storage_options or {})).folder() as folder:
        return load_head(folder)


def learner_plugin() -> LearnerPlugin:
    """The one of the worker that this task runs on; StateError if it has none."""
    found: LearnerPlugin | None = get_worker().plugins.get(PLUGIN)
    if found is None:
        raise StateError("this worker has no learner; pin training tasks to a worker that LearnerPlugin was registered on")
    return found


def fenced_task(coordinator: int, task: Callable[..., T], *args: Any) -> T:
    """What `task` gives here, if it is `coordinator` that this worker's learner belongs to. Superseded, StateError."""
    admit(coordinator, learner_plugin().coordinator)
    return task(*args)


def train_task(batch: Batch, keep_state: bool = False, given: Sequence[Logprobs] = ()) -> StepMetrics:
    """Trains on `batch`, whose trajectories are read here, by receipt. Run again for the same batch it returns what the first run returned.

    `keep_state` copies the whole state afterwards, for a checkpoint beside the next step. `given` are the log-probabilities that other
    workers computed for the whole batch, where it is theirs to do so. BatchError, TransformError, StateError, NonFiniteError.
    """
    return learner_plugin().train(batch, keep_state, given)


def supervised_task(segments: Sequence[Segment]) -> SupervisedMetrics:
    """One supervised step on the masked tokens of `segments`."""
    plugin = learner_plugin()
    with plugin.learner.lock:
        plugin.forget()
        return plugin.learner.supervised_step(segments)


def begin_task(optimiser: OptimiserSettings | None = None, step: int = 0) -> None:
    """Starts training at `step` from the weights held now, with a fresh optimiser: after a warm-up, say."""
    plugin = learner_plugin()
    with plugin.learner.lock:
        plugin.forget()
        plugin.learner.begin(optimiser, step)


def publish_task(version: Version, parent: Version | None = None, metadata: Mapping[str, Any] | None = None) -> Version:
    """Publishes the weights or adapters of `version`, the learner's present one or the one before, and returns once it exists."""
    plugin = learner_plugin()
    weights = plugin.snapshot(version)  # a copy already, which nothing changes while it is written
    said, files = plugin.described(metadata or {})
    return plugin.weights.publish(weights, version=version, parent=parent, metadata=said, files=files, background=False).result()


def checkpoint_task(version: Version, documents: Mapping[str, Any] | None = None) -> Version:
    """Saves the learner's state at `version` and the caller's JSON `documents` in one commit.

    The state is the one that `train_task` kept, or the present one, if the learner is still at that step.
    """
    plugin = learner_plugin()
    arrays, document = plugin.state(version)
    return plugin.checkpoints.save(version.step, version.lineage, arrays=arrays, documents=own_document(documents or {}, document))


def own_document(documents: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """The run's `documents`, with the learner's own among them; StateError if one has its name."""
    if _DOCUMENT in documents:
        raise StateError(f"the document name {_DOCUMENT!r} is the learner's own; give the run's documents other names")
    return {**documents, _DOCUMENT: dict(document)}


def collect_task(keeping: Keeping) -> None:
    """Removes the checkpoints that are not kept, then the versions that are not. A run can go on from any checkpoint that stays, so the
    version that it would branch off stays with it. StoreError."""
    from storage.keeping.retention import Retention

    plugin = learner_plugin()
    plugin.checkpoints.gc(Retention(keep_last=keeping.checkpoints or sys.maxsize), grace_s=keeping.grace)
    kept = Retention(
        keep_last=keeping.last or sys.maxsize, keep_every=keeping.every or None, window=keeping.window, keep=frozenset(plugin.checkpoints.versions())
    )
    plugin.weights.gc(kept, grace_s=keeping.grace)
    if plugin.learner.draft is not None:
        plugin.drafts.gc(Retention(keep_last=keeping.last or sys.maxsize), grace_s=keeping.grace)


def load_weights_task(version: Version | None = None) -> Version:
    """Takes over the weights of a published version (default: the newest), with a fresh optimiser, at that version's step."""
    from storage.models.adapters import Whole

    plugin = learner_plugin()
    found = version or plugin.weights.newest()
    if found is None:
        raise StateError(f"{plugin.weights_url} holds no version to start from; publish one first")
    weights = Whole(plugin.weights, found).pull()
    with plugin.learner.lock:
        plugin.forget()
        plugin.learner.load_weights(weights, found.step)
    return found


def load_checkpoint_task(version: Version | None = None) -> tuple[Version, dict[str, Any]]:
    """Goes on from a checkpoint (default: the newest), bit for bit; returns its version and the documents saved with it."""
    plugin = learner_plugin()
    checkpoint = plugin.checkpoint(version)
    if _DOCUMENT not in checkpoint.documents:
        raise StateError(f"checkpoint {checkpoint.version} in {plugin.checkpoints_url} holds no learner's state")
    document: Any = checkpoint.documents.pop(_DOCUMENT)
    with plugin.learner.lock:
        plugin.forget()
        plugin.learner.load_state(checkpoint.arrays, document)
    return checkpoint.version, checkpoint.documents


def supervised_receipts_task(receipts: Sequence[Receipt]) -> SupervisedMetrics:
    """One supervised step on the durable trajectories that `receipts` name."""
    from rollart.training.batch_share import segments_share

    plugin = learner_plugin()
    return supervised_task(segments_share(receipts, plugin.read, plugin.learner.ranks))


def resume_task() -> Resumed:
    """Loads the newest checkpoint, if there is one, and opens the lineage that goes on from it, in both stores.

    A crash between the two leaves the stores' numbers apart; the lower one is opened again until they agree.
    """
    plugin = learner_plugin()
    parent = plugin.checkpoints.newest()
    documents: dict[str, Any] = {}
    if parent is not None:
        _, documents = load_checkpoint_task(parent)
    lineage = plugin.checkpoints.open_lineage(parent)
    opened = plugin.weights.open_lineage(parent)
    while opened != lineage:
        if opened < lineage:
            opened = plugin.weights.open_lineage(parent)
        else:
            lineage = plugin.checkpoints.open_lineage(parent)
    return Resumed(parent, lineage, documents)
