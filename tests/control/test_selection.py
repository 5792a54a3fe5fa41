"""What redundancy does to the lengths that are trained on, where length drives latency: the default rule shifts nothing, the first finishers do."""

from __future__ import annotations

import random

import pytest

from benchmarks.kolmogorov import ks_test
from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import TaskQuota
from rollart.control.redundancy import Redundancy, RedundancyRule
from rollart.control.staleness import StalenessWindow
from rollart.types import Attempt, Receipt, Score
from tests.control.simulated import Event, Simulation

SECONDS_A_TOKEN = 0.05
SEEDS = (1, 2, 3, 4)
STEPS = 12


class Lengths(Simulation):
    """Groups of 8, synchronous; a response takes as long as it is long, after a reset that is now and then very slow whatever comes after it."""

    def __init__(self, seed: int, rule: RedundancyRule) -> None:
        super().__init__(seed)
        self.seed, self.alpha = seed, 0
        self.quotas = [TaskQuota("t", 8, 8, 8, spread=False)]
        self.policy = FailurePolicy(lease_s=1e9)
        self.redundancy = Redundancy(rule)
        self.options = {"redundancy": self.redundancy, "short": "wait"}
        self.ledger = Ledger(self.quotas, StalenessWindow(0), self.policy, **self.options)

    def tokens(self, attempt: Attempt) -> int:
        """A function of the member: another try at it samples the same response."""
        return int(random.Random(f"{self.seed}/{attempt.episode.index}/{attempt.member}").lognormvariate(6.0, 0.8)) + 1

    def send(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self.out.add(attempt)
            self.sent += 1
            reset = self.rng.uniform(100, 400) if self.rng.random() < 0.05 else self.rng.lognormvariate(0.5, 0.5)
            self.at(reset, "begin", attempt)
            self.at(reset + SECONDS_A_TOKEN * self.tokens(attempt), "finish", attempt)

    def happens(self, event: Event) -> None:
        if event.kind != "finish":
            super().happens(event)
            return
        attempt = event.attempt
        self.out.discard(attempt)
        receipt = Receipt(attempt, str(event.order), 0, "f", 0, "terminated", self.version, self.version, 4, self.tokens(attempt), 1)
        self.ledger.scored(receipt, Score(attempt, receipt.nonce, 1.0))

    def trained(self) -> list[int]:
        """Lengths of what `STEPS` steps trained on."""
        self.step_until(STEPS, patience=200_000)
        return [m.receipt.sampled for batch in self.batches for m in batch.members]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return Lengths(1000, "none").trained()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_default_rule_trains_on_the_lengths_that_a_run_without_redundancy_does(seed: int, plain: list[int]) -> None:
    run = Lengths(seed, "before_first_token")
    lengths = run.trained()
    assert run.ledger.ends["yielded"] > 0 and not run.ledger.fates.get("spare", 0)
    assert ks_test(lengths, plain)[1] > 0.05
    assert {(m.receipt.attempt.episode.index, m.receipt.attempt.member) for b in run.batches for m in b.members} == {
        (index, member) for index in range(8 * STEPS) for member in range(8)
    }  # every member that was planned, whoever of its tries began first


@pytest.mark.parametrize("seed", SEEDS)
def test_first_finished_trains_on_shorter_ones(seed: int, plain: list[int]) -> None:
    run = Lengths(seed, "first_finished")
    lengths = run.trained()
    assert run.ledger.fates.get("spare", 0) == 3 * 8 * STEPS
    assert ks_test(lengths, plain)[1] < 0.001
    assert sum(lengths) / len(lengths) < 0.8 * sum(plain) / len(plain)


def test_an_attempt_that_has_begun_is_never_stopped_by_the_default_rule_however_slow() -> None:
    run = Lengths(5, "before_first_token")
    begun: set[Attempt] = set()
    stopped: list[Attempt] = []
    note, stops = run.ledger.begun, run.ledger.stops

    def noted(attempt: Attempt, now: float) -> None:
        note(attempt, now)
        if attempt in run.ledger.running():
            begun.add(attempt)

    def told() -> list[Attempt]:
        found = stops()
        stopped.extend(found)
        return found

    run.ledger.begun, run.ledger.stops = noted, told  # type: ignore[method-assign]
    run.trained()
    assert stopped and not begun & set(stopped)
