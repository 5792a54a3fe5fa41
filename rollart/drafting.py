"""What the flow draft works with: a run's trajectories, the policy that the head is for, and the head; owns where they come from and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollart.config import Config, ConfigError
from rollart.control.seeds import derive
from rollart.drafts.errors import DraftError
from rollart.drafts.folder import CONFIG, config_file, load_head, save_head
from rollart.drafts.vocabulary import frequent_tokens
from rollart.policy import PolicyError, load_tokenizer
from rollart.rollout.stored import sampled_trajectories
from rollart.run import RunFolder
from rollart.training.batch import TrainSequence
from rollart.training.draft_texts import DraftTexts, sampled_counts, sequences, split_texts
from rollart.training.draft_trainer import DraftTrainer, fresh_head
from rollart.training.errors import BatchError
from rollart.training.metrics import DraftMetrics
from rollart.training.microbatch import MicroBatch, micro_batches
from rollart.training.policy import Policy, load_model
from storage.models.model import Model
from storage.version import Version
from storage.weights import WeightStore

__all__ = ["Drafting", "open_drafting"]

HEADS = "heads"
"""The part of a run's folder with the heads that this flow made; those that learn in the run itself are in `drafts`."""

TOKENIZER = "tokenizer.json"


class Drafting:
    """A head in training on fixed `texts`: everything follows from the run's seed."""

    def __init__(self, config: Config, folder: RunFolder, trainer: DraftTrainer, texts: DraftTexts, policy: str) -> None:
        self.config, self.settings, self.texts = config, config.draft_training, texts
        self._folder, self._trainer, self._policy = folder, trainer, policy

    def learn(self, step: int) -> DraftMetrics | None:
        """One optimiser step on `batch` trajectories; what the head did on them before it."""
        for micro, states in self._passes(self.texts.batch(step, self.settings.batch, self.config.run.seed)):
            self._trainer.learn(micro, states)
        found = self._trainer.update()
        if self._trainer.stopped:
            raise ConfigError(f"training.draft.optimiser: step {step} of the head had a gradient that is not finite; lower lr")
        return found

    def acceptance(self) -> tuple[float, ...]:
        """By drafted token, the mean chance that it is accepted, given that those before were, on the episodes held out."""
        for micro, states in self._passes(sequences(self.texts.held_out)):
            self._trainer.measure(micro, states)
        found = self._trainer.measured()
        if found is None:
            raise ConfigError(f"{self._folder.url}: the episodes held out have no token that a head could draft; play longer ones")
        return found.acceptance

    def publish(self, before: tuple[float, ...], after: tuple[float, ...]) -> tuple[str, Version]:
        """Makes the head the next version of its store, and writes its folder if one is named; the store's URL, and the version. StoreError."""
        head, named = self._trainer.head, self.settings
        store = _store_of(self.config, self._folder)
        newest = store.newest()
        said: dict[str, Any] = {"flow": "draft", "run": self._folder.url, "policy": self._policy, "before": list(before), "after": list(after)}
        made = store.publish(
            self._trainer.weights(), step=0 if newest is None else newest.step + 1, parent=newest, metadata=said,
            files={CONFIG: config_file(head.config)}, background=False,
        )  # fmt: skip
        if named.folder is not None:
            save_head(head, Path(named.folder))
        return store.url, made.result()

    def _passes(self, found: tuple[TrainSequence, ...]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """The policy's passes over sequences: micro-batches and hidden states [B * T, H], which nothing goes back through."""
        policy = self._trainer.policy
        for micro in micro_batches(found, self.config.training.batch, packed=policy.packs):
            here = micro.to(policy.device, policy.compute_dtype)
            with torch.no_grad():
                states = policy.score(here, states=True).states
            if states is not None:
                yield here, states


@contextmanager
def open_drafting(config: Config, folder: RunFolder) -> Iterator[Drafting]:
    """The run in `folder`, as its `config` says with what the user changes. ConfigError if it has no trajectories, the policy another tokenizer,
    or the head another policy; StoreError for what isn't there."""
    _refuse_used(config.draft_training.folder)
    location = _policy_of(config, folder)
    model = Model(location, folder.storage_options)
    names = model.names()
    if TOKENIZER in names and model.file(TOKENIZER) != Model(folder.child("policy"), folder.storage_options).file(TOKENIZER):
        raise ConfigError(f"draft_training.policy: {model} has another tokenizer than {folder.url}, whose trajectories are its token ids")
    trajectories = sampled_trajectories(folder.store, config.draft_training.trajectories)
    if not trajectories:
        raise ConfigError(f"{folder.url} holds no trajectory that a policy sampled; name a run that has trained or evaluated one")
    plain = {"lora": None, "shard": False, "recompute": False, "seed": derive(config.run.seed, "weights")}
    try:
        texts = split_texts(trajectories, config.draft_training.held_out, config.run.seed)
        with model.folder() as local:
            learner = config.training.model.model_copy(update=plain)
            policy = Policy(load_model(local, learner), head_rows=learner.head_rows, packing=config.training.batch.packing)
            trainer = _trainer(config, folder, policy, texts, local)
            _store_of(config, folder).check_writable()  # before hours of training, not after
            yield Drafting(config, folder, trainer, texts, str(model))
    except (DraftError, BatchError, PolicyError) as error:
        raise ConfigError(f"{folder.url}: {error}") from error


def _trainer(config: Config, folder: RunFolder, policy: Policy, texts: DraftTexts, local: Path) -> DraftTrainer:
    settings, model = config.training.draft, policy.model
    if settings.model is not None:
        with Model(settings.model, folder.storage_options).folder() as start:
            return DraftTrainer(policy, load_head(start), settings)
    kept = None
    if settings.kept is not None:
        said: Any = model.config
        ends = said.eos_token_id if isinstance(said.eos_token_id, list) else [said.eos_token_id]
        always = {int(i) for i in (*ends, load_tokenizer(local).eos_token_id) if i is not None}
        kept = frequent_tokens(sampled_counts(texts.learnt, len(policy.output_weight)), settings.kept, always)
    return DraftTrainer(policy, fresh_head(policy, settings, derive(config.run.seed, "draft"), kept), settings)


def _policy_of(config: Config, folder: RunFolder) -> str:
    said = config.draft_training.policy
    return said if "/" in said else f"{folder.child('weights')}@{said}"


def _store_of(config: Config, folder: RunFolder) -> WeightStore:
    """Where the head becomes a version."""
    return WeightStore(config.draft_training.store or folder.child(HEADS), folder.storage_options)


def _refuse_used(folder: str | None) -> None:
    if folder is not None and Path(folder).exists() and (not Path(folder).is_dir() or any(Path(folder).iterdir())):
        raise ConfigError(f"draft_training.folder: {folder} is there already; name a new folder")
