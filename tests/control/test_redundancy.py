"""Spares: who gets one, who yields to whom, and that what was begun is finished."""

import pytest

from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import TaskQuota
from rollart.control.redundancy import MEASURED, Delays, Redundancy
from rollart.control.staleness import StalenessWindow
from rollart.types import Attempt, Receipt, Score


def make(redundancy: Redundancy, size: int = 4, quota: int = 1, rest_s: float = 0.0) -> Ledger:
    policy = FailurePolicy(attempts=2, lease_s=1000.0, rest_s=rest_s)
    ledger = Ledger([TaskQuota("t", quota, size, size)], StalenessWindow(0), policy, redundancy=redundancy)
    for _ in range(MEASURED):  # so that it is known: nine in ten begin within a second
        ledger.delays.note("t", 1.0)
    return ledger


def finish(ledger: Ledger, attempt: Attempt, value: float = 0.0) -> bool:
    receipt = Receipt(attempt, str(attempt), 0, "f", 0, "terminated", 0, 0, 4, 2, 1)
    return ledger.scored(receipt, Score(attempt, receipt.nonce, value))


def test_delays_are_told_only_once_enough_are_known() -> None:
    delays = Delays()
    for second in range(MEASURED - 1):
        delays.note("t", float(second))
    assert delays.quantile("t", 0.5) is None
    delays.note("t", 100.0)
    assert delays.quantile("t", 0.5) == 10.0 and delays.quantile("t", 0.95) == 100.0 and delays.quantile("other", 0.5) is None


def test_a_member_whose_first_token_is_late_gets_a_spare_and_the_first_to_begin_goes_on() -> None:
    ledger = make(Redundancy("before_first_token", factor=1.5))
    (group,) = ledger.admit(served=0, now=0.0)
    assert ledger.due(now=1.0) == []  # as long as most take
    ledger.begun(group[0], now=1.0)
    spares = ledger.due(now=1.5)
    assert spares == [group[1].retried(), group[2].retried()]  # half as many again as the group has members, no more
    assert ledger.due(now=2.0) == []
    ledger.begun(spares[0], now=2.0)
    assert ledger.stops() == [group[1]]
    ledger.begun(group[2], now=2.5)
    assert ledger.stops() == [spares[1]]
    assert ledger.due(now=3.0) == [group[3].retried()]  # two of its tries are back
    assert ledger.ends == {"yielded": 2}
    assert not finish(ledger, group[1]) and ledger.late == 1
    for attempt in (group[0], spares[0], group[2], group[3]):
        assert finish(ledger, attempt, float(attempt.member))
    assert ledger.stops() == [group[3].retried()] and ledger.ends == {"yielded": 3, "scored": 4}
    batch = ledger.form_batch()
    assert batch is not None and [m.receipt.attempt for m in batch.members] == [group[0], spares[0], group[2], group[3]]


def test_what_has_begun_is_finished_however_slow() -> None:
    ledger = make(Redundancy("before_first_token", factor=2.0))
    (group,) = ledger.admit(served=0, now=0.0)
    for attempt in group:
        ledger.begun(attempt, now=0.5)
    assert ledger.due(now=900.0) == [] and ledger.stops() == []


def test_of_two_that_began_the_one_that_is_heard_of_first_goes_on() -> None:
    ledger = make(Redundancy("before_first_token", factor=1.25))
    (group,) = ledger.admit(served=0, now=0.0)
    (spare,) = ledger.due(now=5.0)
    ledger.begun(group[0], now=6.0)
    ledger.begun(spare, now=6.0)
    ledger.begun(group[0], now=7.0)
    assert ledger.stops() == [spare] and group[0] in ledger.running()


def test_a_spare_takes_the_place_of_a_try_that_failed_without_a_rest() -> None:
    ledger = make(Redundancy("before_first_token", factor=1.25), rest_s=100.0)
    (group,) = ledger.admit(served=0, now=0.0)
    (spare,) = ledger.due(now=5.0)
    ledger.failed(group[0], "machine", now=6.0)
    assert spare in ledger.running() and group[0] not in ledger.running()
    ledger.failed(spare, "machine", now=7.0)
    assert ledger.due(now=8.0) == [group[1].retried()]  # the spare's place is another's now, and member 0 rests
    assert ledger.due(now=66.9) == [] and ledger.due(now=67.0) == [Attempt(group[0].episode, 0, 2)]


def test_without_a_rule_nothing_is_launched_besides() -> None:
    ledger = make(Redundancy())
    (group,) = ledger.admit(served=0, now=0.0)
    assert len(group) == 4 and ledger.due(now=900.0) == []


def test_first_finished_launches_larger_groups_and_stops_who_is_last() -> None:
    ledger = make(Redundancy("first_finished", factor=1.5))
    (group,) = ledger.admit(served=0, now=0.0)
    assert len(group) == 6
    for attempt in (group[5], group[0], group[3], group[2]):
        finish(ledger, attempt, float(attempt.member))
    assert sorted(ledger.stops()) == [group[1], group[4]] and ledger.fates == {"spare": 2}
    batch = ledger.form_batch()
    assert batch is not None and [m.receipt.attempt.member for m in batch.members] == [0, 2, 3, 5]
    assert ledger.ends == {"scored": 4, "stopped": 2}
    assert [fate for _, _, fate in ledger.settle(batch).fates] == ["spare"] * 2 + ["trained"] * 4


def test_what_is_stopped_for_others_is_told_with_the_tokens_of_the_last_that_had_ended_by_then() -> None:
    ledger = make(Redundancy("first_finished", factor=1.5))
    (group,) = ledger.admit(served=0, now=0.0)
    for tokens, attempt in zip((2, 3, 5, 8), group, strict=False):
        receipt = Receipt(attempt, str(attempt), 0, "f", 0, "terminated", 0, 0, 20, tokens, 1)
        ledger.scored(receipt, Score(attempt, receipt.nonce, float(attempt.member)))
    batch = ledger.form_batch()
    assert batch is not None
    ledger.settle(batch)
    told = ledger.tallies.by_task["t"]
    assert (told["spare"].members, told["spare"].mean_sampled, told["spare"].least_sampled) == (2, None, 8.0)
    assert (told["trained"].mean_sampled, told["trained"].least_sampled) == (4.5, None)


@pytest.mark.parametrize(("field", "value"), [("factor", 0.9), ("factor", 5.0), ("patience", 1.0), ("patience", -0.1)])
def test_a_factor_or_a_patience_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Redundancy("before_first_token", **{field: value})  # type: ignore[arg-type]


def test_a_resumed_run_goes_on_with_one_try_a_member_and_counts_the_others_as_yielded() -> None:
    ledger = make(Redundancy("before_first_token", factor=2.0))
    (group,) = ledger.admit(served=0, now=0.0)
    ledger.begun(group[0], now=1.0)
    spares = ledger.due(now=5.0)
    ledger.begun(group[1], now=6.0)
    resumed = Ledger.restore(ledger.cut(), list(ledger.quotas.values()), ledger.window, ledger.policy, lineage=1, redundancy=ledger.redundancy)
    assert spares == [a.retried() for a in group[1:]]
    assert resumed.running() == group  # the first of each, and the one of the second that had begun
    assert resumed.ends == {"yielded": 3}
