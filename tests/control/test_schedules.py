"""Thousands of seeded schedules of slow, lost, late and repeated work, through stops and resumes: the ledger's promises hold in all of them."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.control.simulated import Simulation

QUICK, ALL, EACH = 300, 10_000, 100


def plays(seed: int) -> None:
    simulation = Simulation(seed)
    simulation.step_until(4)
    if seed % 2:
        simulation.resume()
    simulation.step_until(8)
    trained: Counter[tuple[object, int]] = Counter()
    groups: Counter[object] = Counter()
    for number, batch in enumerate(simulation.batches):
        assert batch.step == number
        assert all(batch.step - m.receipt.first_version <= simulation.alpha for m in batch.members)
        assert len(batch.groups) == sum(q.quota for q in simulation.quotas)
        if simulation.options["short"] == "wait":
            assert Counter(g.episode.task for g in batch.groups) == {q.task: q.quota for q in simulation.quotas}
        for group in batch.groups:
            groups[group.episode] += 1
            size = next(q for q in simulation.quotas if q.task == group.episode.task)
            assert size.min_members <= len(group.members) <= size.group_size
        trained.update((m.receipt.attempt.episode, m.receipt.attempt.member) for m in batch.members)
    assert set(trained.values()) == {1} and set(groups.values()) == {1}  # nothing is trained on twice
    fates: Counter[tuple[object, int]] = Counter((attempt.episode, attempt.member) for attempt, _, _ in simulation.fates)
    if not seed % 2:
        assert set(fates.values()) == {1}  # every member that ended did so once
        open_members = sum(len(g.members) for g in simulation.ledger.cut().open)
        ended_open = sum(m.state == "dropped" for g in simulation.ledger.cut().open for m in g.members)
        admitted = sum(simulation.ledger._next_index[q.task] * simulation.redundancy.launched(q.group_size) for q in simulation.quotas)
        assert admitted == sum(simulation.ledger.fates.values()) + open_members - ended_open


@pytest.mark.parametrize("block", range(QUICK // EACH))
def test_every_promise_holds(block: int) -> None:
    for seed in range(block * EACH, (block + 1) * EACH):
        plays(seed)


@pytest.mark.slow
def test_every_promise_holds_in_ten_thousand() -> None:
    """About a minute on two free cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        assert sum(processes.map(play_block, range(QUICK // EACH, ALL // EACH))) == ALL - QUICK


def play_block(block: int) -> int:
    """How many schedules were played."""
    for seed in range(block * EACH, (block + 1) * EACH):
        try:
            plays(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return EACH
