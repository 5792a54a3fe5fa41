"""Asks a stored version again what it said of tokens that it sampled, where a batch has too few tokens of the trainer's own version.

Owns which tokens are asked for and the pass over them; what a difference means is said in `agreement`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollart.training.agreement import Rescored
from rollart.training.batch import TrainBatch, TrainSequence
from rollart.training.learner import Learner
from rollart.training.lora import adapters, load_adapters, load_base
from rollart.training.state import copies, fill
from storage.errors import StoreError
from storage.models.adapters import Whole
from storage.version import Version
from storage.weights import WeightStore

__all__ = ["rescored", "sample_of"]

log = logging.getLogger(__name__)


def rescored(learner: Learner, batch: TrainBatch, lineage: int, store: WeightStore) -> Rescored | None:
    """What a sample of `batch`, in which all ranks have a share, comes to; None where none is due, or where the version can't be had.

    The weights of that version, the whole ones or the adapters, take the place of the learner's for the time of a forward pass, and those
    are put back bit for bit: the version and a copy of what is held are in memory beside the model meanwhile, and nothing of a step is.
    """
    with learner.lock:
        ranks, settings = learner.ranks, learner.settings.agreement
        step = _due(learner, batch)
        if step is None:
            return None
        there = [v for v in _versions(store) if v.step == step and v.lineage <= lineage]
        version = ranks.gather(max(there, default=None))[0]
        if version is None:
            log.warning("the agreement with the engine can't be checked: no version of step %d is stored any more; keep more of them", step)
            return None
        other = _other(learner, store, version)
        if not all(ranks.gather(other is not None)) or other is None:
            return None
        gaps: list[Tensor] = []
        with _in_place(learner, other), torch.no_grad():
            for micro in learner.cut(sample_of(batch, step, -(-settings.sample // ranks.count))):
                found = learner.policy.logprobs(micro)[0]
                if micro.members:
                    gaps.append((found - micro.behaviour).abs().double().cpu())
        here = torch.cat(gaps) if gaps else torch.zeros(0, dtype=torch.float64)
        parts = ranks.gather((len(here), float(here.sum()), float(here.max()) if len(here) else 0.0))
        tokens = sum(n for n, _, _ in parts)
        highest = float(torch.tensor([most for _, _, most in parts]).max())  # which lets through what is not a number
        return Rescored(version, tokens, sum(total for _, total, _ in parts) / max(1, tokens), highest)


def _due(learner: Learner, batch: TrainBatch) -> int | None:
    """The step of the version whose tokens are to be looked at: of those older than the trainer's the one with the most in the batch."""
    settings = learner.settings.agreement
    if not settings.sample or (batch.step - 1) % settings.every:
        return None
    counts: Counter[int] = Counter()
    for mine in learner.ranks.gather(Counter(v for s in batch.sequences for v in s.versions.tolist())):
        counts.update(mine)
    stale = {step: n for step, n in counts.items() if step != batch.step}
    if counts[batch.step] >= settings.own or not stale:
        return None
    return max(stale, key=lambda step: (stale[step], step))


def sample_of(batch: TrainBatch, step: int, most: int) -> tuple[TrainSequence, ...]:
    """Of the first `most` trajectories with tokens that version `step` sampled: their sequences, with these as the trained tokens."""
    chosen: list[TrainSequence] = []
    numbers: set[int] = set()
    for s in batch.sequences:
        own = s.versions == step
        if not bool(own.any()) or (s.trajectory not in numbers and len(numbers) == most):
            continue
        numbers.add(s.trajectory)
        positions = s.positions[own]
        per_token = {name: getattr(s, name)[own] for name in ("behaviour", "versions", "advantages")}
        cut = None if s.cut is None else s.cut.only(own)
        chosen.append(replace(s, ids=s.ids[: int(positions[-1]) + 1], positions=positions, returns=None, cut=cut, **per_token))
    return tuple(chosen)


def _versions(store: WeightStore) -> list[Version]:
    try:
        return store.versions()
    except StoreError as error:
        log.warning("the agreement with the engine can't be checked: %s", error)
        return []


@dataclass(frozen=True, slots=True)
class _Other:
    """The tensors of another version, whole weights or `alone` the adapters."""

    values: dict[str, Tensor]
    alone: bool


def _other(learner: Learner, store: WeightStore, version: Version) -> _Other | None:
    """What takes the learner's weights' place; None if it can't be read."""
    try:
        whole = Whole(store, version)
        if whole.adapter is not None and learner.settings.model.publishes_adapters:
            return _Other(store.pull(version), alone=True)
        values = store.pull(version, slices=_cuts(learner, whole.tensors)) if whole.adapter is None else whole.pull()
    except StoreError as error:
        log.warning("the agreement with the engine can't be checked: %s", error)
        return None
    return _Other(values, alone=False)


def _cuts(learner: Learner, names: Mapping[str, object]) -> dict[str, tuple[slice, ...]]:
    """This rank's parts of a model that is spread over them."""
    if not learner.sharded:
        return {}
    from rollart.training.sharding import cuts

    return {name.removeprefix("weights/"): cut for name, cut in cuts(learner, [f"weights/{name}" for name in names]).items()}


@contextmanager
def _in_place(learner: Learner, other: _Other) -> Iterator[None]:
    """Puts what the model holds back at the end, all that `other` took the place of."""
    model = learner.policy.model
    take, put_back = (load_adapters, load_adapters) if other.alone else (fill if learner.settings.model.lora is None else load_base, fill)
    held = adapters(model) if other.alone else copies(model)
    try:
        take(model, other.values)
        yield
    finally:
        put_back(model, held)
