"""A learner that is given its reference and proximal log-probabilities trains as one that computes them itself, or refuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollart.training.batch import TrainBatch
from rollart.training.batch_share import train_share
from rollart.training.errors import LogprobsMismatch, StateError
from rollart.training.learner import Learner
from rollart.training.logprobs.given import Given
from rollart.training.logprobs.held import HeldPolicy
from rollart.training.logprobs.table import Logprobs, LogprobTable
from rollart.training.ranks import ALONE
from rollart.training.settings import BatchSettings, LearnerSettings
from rollart.training.shares import minibatch_of
from rollart.types import Batch, Receipt, SamplingTransform, Trajectory
from storage.version import Version
from storage.weights import WeightStore
from tests.training.conftest import make_trajectories_of
from tests.training.test_ranks import batch_of

TRAJECTORIES = make_trajectories_of((4, 3, 3), transform=SamplingTransform(temperature=0.8))
VERSION = Version(0, 0)


@dataclass(frozen=True)
class Place:
    rank: int
    count: int


def _read(receipts: Sequence[Receipt]) -> list[Trajectory]:
    return [TRAJECTORIES[r.row] for r in receipts]


def _settings(**batch: Any) -> LearnerSettings:
    return LearnerSettings.model_validate(
        {
            "model": {"dtype": "float64"}, "optimiser": {"lr": 0.02}, "batch": {"minibatches": 2, "token_budget": 40, **batch},
            "loss": {"kl": 0.3, "entropy": 0.01}, "advantage": {"name": "rloo"},
        }
    )  # fmt: skip


def _parts(learner: Learner, batch: Batch, shares: int, budget: int, *, packed: bool = False) -> list[Logprobs]:
    """What `shares` other workers would say, with the learner's own policies and micro-batches of their own."""
    settings = BatchSettings(token_budget=budget, packing=packed)
    part = minibatch_of(batch.members, learner.settings.batch.minibatches)
    version = Version(batch.lineage, batch.step)
    store = WeightStore("memory://nothing")
    found = []
    for rank in range(shares):
        sequences = train_share(batch, learner.settings, _read, Place(rank, shares)).sequences
        later = [s for s in sequences if part[s.trajectory]]
        assert learner.reference is not None
        reference, proximal = (
            HeldPolicy(policy, store).logprobs(chosen, settings) for policy, chosen in ((learner.reference, sequences), (learner.policy, later))
        )
        found.append(Logprobs(version, LogprobTable.of(VERSION, sequences, reference), LogprobTable.of(version, later, proximal)))
    return found


def _share(batch: Batch, settings: LearnerSettings) -> TrainBatch:
    return train_share(batch, settings, _read, ALONE)


@pytest.mark.parametrize(("shares", "budget", "own"), [(1, 10_000, {}), (3, 25, {"packing": False}), (2, 1, {"token_budget": 10_000})])
def test_given_log_probabilities_lead_where_its_own_lead_however_either_side_cuts_the_batch(gpt2: Path, shares: int, budget: int, own: Any) -> None:
    settings = _settings(**own)
    whole, told = Learner(gpt2, settings), Learner(gpt2, settings, elsewhere=True)
    for step in range(3):  # after the first one the policy, its version and the reference differ
        batch = batch_of(TRAJECTORIES, step, range(10))
        given = Given(_parts(whole, batch, shares, budget), Version(0, step))
        theirs, ours = told.train_step(_share(batch, settings), given), whole.train_step(_share(batch, settings))
        assert ours.optimiser_steps == theirs.optimiser_steps == 2
        for name in ("loss", "grad_norm", "kl", "drift", "ratio"):
            if (value := getattr(ours, name, None)) is not None:
                assert getattr(theirs, name) == pytest.approx(value, rel=1e-10, abs=1e-12)
    assert ours.kl is not None and ours.kl > 1e-4  # else the reference said nothing
    assert all(torch.allclose(value, told.weights()[name], rtol=0, atol=1e-12) for name, value in whole.weights().items())


def test_a_learner_that_is_given_them_holds_no_reference_in_memory_or_in_its_checkpoints(gpt2: Path) -> None:
    whole, told = Learner(gpt2, _settings()), Learner(gpt2, _settings(), elsewhere=True)
    assert whole.reference is not None and told.reference is None
    arrays, document = whole.state()
    kept, _ = told.state()
    assert set(arrays) - set(kept) == {name for name in arrays if name.startswith("reference/")} != set()
    told.load_state(kept, document)
    with pytest.raises(StateError, match="no reference policy here"):
        told.train_step(_share(batch_of(TRAJECTORIES, 0, range(10)), _settings()))


def _other_tokens(part: Logprobs) -> Logprobs:
    assert part.reference is not None
    marks = part.reference.marks.copy()
    marks[2, 0] ^= 1
    return replace(part, reference=replace(part.reference, marks=marks))


def _one_too_few(part: Logprobs) -> Logprobs:
    assert part.proximal is not None
    counts = part.proximal.counts.copy()
    counts[0] -= 1
    counts[1] += 1
    return replace(part, proximal=replace(part.proximal, counts=counts))


def _without_one(part: Logprobs) -> Logprobs:
    table = part.reference
    assert table is not None
    n = int(table.counts[-1])
    return replace(part, reference=replace(table, keys=table.keys[:-1], counts=table.counts[:-1], marks=table.marks[:-1], values=table.values[:-n]))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_other_tokens, "reference log-probabilities of segment .* are of other tokens"),
        (_one_too_few, "proximal log-probabilities of segment .* are of other tokens"),
        (_without_one, "there are no reference log-probabilities of segment"),
        (lambda part: replace(part, version=Version(0, 7)), "for the step from version 0-7, and this one starts from 0-0"),
        (lambda part: replace(part, proximal=replace(part.proximal, version=Version(1, 0))), "of several versions: 0-0, 1-0"),
    ],
)
def test_what_is_of_other_tokens_or_of_another_version_is_refused_before_anything_is_stepped(gpt2: Path, spoil: Any, said: str) -> None:
    learner = Learner(gpt2, _settings())
    batch = batch_of(TRAJECTORIES, 0, range(10))
    before = learner.weights()
    with pytest.raises(LogprobsMismatch, match=said):
        learner.train_step(_share(batch, _settings()), Given([spoil(p) for p in _parts(learner, batch, 1, 50)], VERSION))
    assert learner.step == 0 and all(torch.equal(value, before[name]) for name, value in learner.weights().items())


def test_a_sequence_that_two_parts_speak_of_is_refused(gpt2: Path) -> None:
    (part,) = _parts(Learner(gpt2, _settings()), batch_of(TRAJECTORIES, 0, range(10)), 1, 50)
    with pytest.raises(LogprobsMismatch, match="are given twice"):
        Given([part, part], VERSION)


def test_a_mark_changes_with_each_thing_that_log_probabilities_depend_on() -> None:
    from rollart.training.logprobs.table import mark_of

    sequence = _share(batch_of(TRAJECTORIES, 0, range(10)), _settings()).sequences[0]
    ids = sequence.ids.clone()
    ids[-1] += 1
    others = [replace(sequence, ids=ids), replace(sequence, positions=sequence.positions[:-1]), replace(sequence, temperature=0.9)]
    assert len({mark_of(s) for s in (sequence, *others)}) == 4
    assert mark_of(replace(sequence, advantages=sequence.advantages + 1, trajectory=5)) == mark_of(sequence)


def test_a_share_without_anything_to_train_on_is_an_empty_table() -> None:
    table = LogprobTable.of(VERSION, [], [])
    assert (table.keys.shape, table.marks.shape, len(table.values)) == ((0, 2), (0, 16), 0)
    assert isinstance(table.values, np.ndarray)
    assert Given([Logprobs(VERSION, table, table)], VERSION).reference([], []) == []
