"""A task twenty times as slow as another keeps its planned share of what is trained on, long trajectories and all, while batches wait for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.kolmogorov import ks_test
from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import ShortRule, TaskQuota
from rollart.control.redundancy import Redundancy
from rollart.control.staleness import StalenessWindow
from rollart.types import Attempt, Receipt, Score
from tests.control.simulated import Event, Simulation

STEPS, GROUPS = 25, 4


class TwoSpeeds(Simulation):
    """Two tasks of equal quotas, groups of 8; how long a trajectory takes is a function of the member, as its length would be."""

    def __init__(self, seed: int, alpha: int, short: ShortRule, slower: float = 20.0) -> None:
        super().__init__(seed)
        self.seed, self.alpha, self.slower = seed, alpha, {"quick": 1.0, "slow": slower}
        self.quotas = [TaskQuota(task, GROUPS, 8, 8, spread=False) for task in self.slower]
        self.policy, self.redundancy = FailurePolicy(lease_s=1e9), Redundancy()
        self.options = {"redundancy": self.redundancy, "short": short}
        self.ledger = Ledger(self.quotas, StalenessWindow(alpha), self.policy, **self.options)

    def seconds(self, attempt: Attempt) -> float:
        task = attempt.episode.task
        return self.slower[task] * random.Random(f"{self.seed}/{task}/{attempt.episode.index}/{attempt.member}").lognormvariate(0.0, 0.6)

    def send(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self.out.add(attempt)
            self.sent += 1
            self.at(self.seconds(attempt), "finish", attempt)

    def happens(self, event: Event) -> None:
        attempt = event.attempt
        self.out.discard(attempt)
        outcome = "over_age" if self.version - event.first > self.alpha else "terminated"  # as a worker would have stopped it
        receipt = Receipt(attempt, str(attempt), 0, "f", 0, outcome, event.first, self.version, 4, 2, 1, {"total": self.seconds(attempt)})
        self.ledger.scored(receipt, Score(attempt, receipt.nonce, 1.0))


def played(seed: int, alpha: int, short: ShortRule, slower: float = 20.0) -> TwoSpeeds:
    simulation = TwoSpeeds(seed, alpha, short, slower)
    simulation.step_until(STEPS, patience=200_000)
    return simulation


@pytest.mark.parametrize("alpha", [0, 1, 3, 8])
def test_shares_are_the_planned_ones_and_what_is_trained_on_is_as_long_as_what_was_sampled(alpha: int) -> None:
    simulation = played(alpha, alpha, "wait")
    groups = Counter(group.episode.task for batch in simulation.batches for group in batch.groups)
    assert groups == {"quick": STEPS * GROUPS, "slow": STEPS * GROUPS}
    assert set(simulation.ledger.fates) == {"trained"}  # nothing was dropped, of either task
    for task in simulation.slower:
        trained = [simulation.seconds(m.receipt.attempt) for b in simulation.batches for m in b.members if m.receipt.attempt.episode.task == task]
        sampled = [
            simulation.seconds(Attempt(g.episode, i)) for b in simulation.batches for g in b.groups for i in range(8) if g.episode.task == task
        ]
        others = [random.Random(f"another seed/{task}/{i}").lognormvariate(0.0, 0.6) * simulation.slower[task] for i in range(len(trained))]
        assert sorted(trained) == sorted(sampled)
        assert ks_test(trained, others)[1] > 0.05


def test_filled_batches_go_on_without_the_slow_task_and_the_tallies_say_so() -> None:
    waiting, filled = played(1, 1, "wait", slower=4.0), played(1, 1, "fill", slower=4.0)
    assert filled.now < waiting.now / 2  # in virtual time
    quick, slow = (filled.ledger.tallies.by_task[task] for task in filled.slower)
    assert set(quick) == {"trained"} and quick["trained"].members > 4 * slow["trained"].members
    kept, lost = slow["trained"], slow["over_age"]
    assert lost.members > kept.members
    assert kept.seconds / kept.played < lost.seconds / lost.played  # whoever is dropped is slow, and the report shows it
