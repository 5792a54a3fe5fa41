"""The ledger's account of episodes: what is admitted, what forms a batch, and that each attempt ends exactly once."""

import random

import pytest
from pydantic import TypeAdapter

from rollart.control.cut import LedgerCut
from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger, LedgerError
from rollart.control.quotas import TaskQuota
from rollart.control.staleness import StalenessWindow
from rollart.types import Attempt, Batch, Outcome, Receipt, Score

CUT = TypeAdapter(LedgerCut)


def make(alpha: int = 1, quota: int = 2, size: int = 2, min_members: int | None = None, attempts: int = 2, tasks: int = 1) -> Ledger:
    quotas = [TaskQuota(f"t{i}", quota, size, min_members or size) for i in range(tasks)]
    return Ledger(quotas, StalenessWindow(alpha), FailurePolicy(attempts, lease_s=10.0))


def finish(ledger: Ledger, attempt: Attempt, version: int, value: float = 0.0, nonce: str = "n", outcome: Outcome = "terminated") -> bool:
    receipt = Receipt(attempt, nonce, 0, "f", 0, outcome, version, version, 4, 2, 1)
    return ledger.scored(receipt, Score(attempt, nonce, value))


def finish_all(ledger: Ledger, groups: list[list[Attempt]], version: int) -> None:
    for group in groups:
        for attempt in group:
            finish(ledger, attempt, version, value=float(attempt.member))


def test_synchronous_training_admits_one_batch_and_nothing_while_it_is_trained_on() -> None:
    ledger = make(alpha=0)
    groups = ledger.admit(served=0, now=0.0)
    assert [a.episode.index for g in groups for a in g] == [0, 0, 1, 1]
    assert ledger.admit(served=0, now=0.0) == []
    finish_all(ledger, groups, 0)
    batch = ledger.form_batch()
    assert batch is not None and batch.step == 0 and len(batch.members) == 4
    assert ledger.admit(served=0, now=0.0) == []  # version 1 does not exist yet
    assert len(ledger.admit(served=1, now=0.0)) == 2


def test_alpha_one_admits_the_next_batch_while_this_one_is_trained_on() -> None:
    ledger = make(alpha=1)
    groups = ledger.admit(served=0, now=0.0)
    assert len(groups) == 4  # this batch and the next
    finish_all(ledger, groups[:2], 0)
    assert ledger.form_batch() is not None
    assert ledger.admit(served=0, now=0.0) == []  # two are under way for step 1; any more would be for step 2, too old then
    assert len(ledger.admit(served=1, now=0.0)) == 2


def test_a_batch_waits_for_a_group_that_the_next_step_could_not_use() -> None:
    ledger = make(alpha=1, quota=1)
    first, second = ledger.admit(served=0, now=0.0)
    finish_all(ledger, [second], 0)
    batch = ledger.form_batch()  # the quick one may go first: the slow one still fits step 1
    assert batch is not None and batch.groups[0].episode.index == 1
    (third,) = ledger.admit(served=1, now=0.0)
    finish_all(ledger, [third], 1)
    assert ledger.form_batch() is None  # taking the third would age out the first
    assert ledger.awaited() == {"t0": 1}
    finish_all(ledger, [first], 0)
    batch = ledger.form_batch()
    assert batch is not None and batch.groups[0].episode.index == 0


def test_every_tasks_quota_is_held_whatever_ends_first() -> None:
    ledger = make(alpha=1, quota=1, tasks=2)
    groups = ledger.admit(served=0, now=0.0)
    finish_all(ledger, [g for g in groups if g[0].episode.task == "t0"], 0)
    assert ledger.form_batch() is None
    finish_all(ledger, [g for g in groups if g[0].episode.task == "t1"], 0)
    batch = ledger.form_batch()
    assert batch is not None and [g.episode.task for g in batch.groups] == ["t0", "t1"]


def test_a_late_result_of_an_older_attempt_is_counted_and_ignored() -> None:
    ledger = make()
    first = ledger.admit(served=0, now=0.0)[0][0]
    assert ledger.failed(first, "environment", now=1.0)
    (again,) = ledger.due(now=1.0)
    assert again == first.retried()
    assert finish(ledger, first, 0) is False and ledger.late == 1
    assert finish(ledger, again, 0) is True
    assert finish(ledger, again, 0, nonce="second execution") is False and ledger.late == 2
    assert ledger.failed(first, "environment", now=2.0) is False and ledger.late == 3


def test_score_and_receipt_of_two_executions_are_refused() -> None:
    ledger = make()
    attempt = ledger.admit(served=0, now=0.0)[0][0]
    receipt = Receipt(attempt, "a", 0, "f", 0, "terminated", 0, 0, 4, 2, 1)
    with pytest.raises(LedgerError, match="one execution"):
        ledger.scored(receipt, Score(attempt, "b", 1.0))


def test_a_member_that_fails_for_good_drops_its_group_below_min_members_and_the_slot_comes_back() -> None:
    ledger = make(quota=1, size=3, min_members=3, attempts=1)
    first, _ = ledger.admit(served=0, now=0.0)
    finish(ledger, first[0], 0)
    assert ledger.failed(first[1], "environment", now=0.0)
    assert dict(ledger.fates) == {"failed": 1, "group_short": 2} and ledger.due(now=0.0) == []
    assert ledger.stops() == [first[2]] and ledger.stops() == []
    assert first[2] not in ledger.running()
    assert [g[0].episode.index for g in ledger.admit(served=0, now=0.0)] == [2]


def test_a_group_above_min_members_goes_on_without_the_lost_one() -> None:
    ledger = make(quota=1, size=3, min_members=2, attempts=1)
    first, _ = ledger.admit(served=0, now=0.0)
    ledger.failed(first[1], "environment", now=0.0)
    finish(ledger, first[0], 0, 0.0)
    finish(ledger, first[2], 0, 1.0)
    batch = ledger.form_batch()
    assert batch is not None and [m.receipt.attempt.member for m in batch.members] == [0, 2]


def test_an_over_age_attempt_takes_its_group_with_it() -> None:
    ledger = make(quota=1)
    first, _ = ledger.admit(served=0, now=0.0)
    assert finish(ledger, first[0], 0, outcome="over_age")
    assert dict(ledger.fates) == {"over_age": 2}
    assert first[1] not in ledger.running()


def test_a_group_that_outlived_the_window_is_dropped_when_a_batch_is_formed() -> None:
    ledger = make(alpha=0, quota=1)
    ledger.next_step = 3
    ledger.admit(served=3, now=0.0)
    attempts = ledger.running()
    for attempt in attempts:
        finish(ledger, attempt, 2)  # sampled from an older version than it was admitted at
    assert ledger.form_batch() is None
    assert dict(ledger.fates) == {"too_stale": 2}


def test_leases_end_and_are_renewed() -> None:
    ledger = make(quota=1, alpha=0)
    (group,) = ledger.admit(served=0, now=0.0)
    assert ledger.expire(now=9.9) == []
    ledger.renew(group[:1], now=9.0)
    assert ledger.expire(now=10.0) == group[1:] == ledger.stops()
    assert ledger.due(now=10.0) == [group[1].retried()]
    assert ledger.expire(now=19.0) == group[:1]
    assert ledger.ends == {"failed:lease": 2}


def test_groups_without_signal_are_settled_as_such() -> None:
    ledger = make(alpha=0, quota=2)
    groups = ledger.admit(served=0, now=0.0)
    finish_all(ledger, groups[:1], 0)
    for attempt in groups[1]:
        finish(ledger, attempt, 0, value=0.5)
    batch = ledger.form_batch()
    assert batch is not None
    settlement = ledger.settle(batch)
    assert sorted(f for _, _, f in settlement.fates) == ["no_signal", "no_signal", "trained", "trained"]
    assert [g.episode.index for g in ledger.teaching(batch).groups] == [0]


def test_a_group_without_spread_is_trained_on_where_the_estimator_compares_with_more_than_the_group() -> None:
    ledger = Ledger([TaskQuota("t0", 2, 2, 2, spread=False, replace_flat=True)], StalenessWindow(0), FailurePolicy())
    for group in ledger.admit(served=0, now=0.0):
        for attempt in group:
            finish(ledger, attempt, 0, value=0.5)
    batch = ledger.form_batch()
    assert batch is not None and ledger.teaching(batch) == batch
    assert [fate for _, _, fate in ledger.settle(batch).fates] == ["trained"] * 4


def _filtering(**fields: object) -> Ledger:
    quotas = [TaskQuota("t0", 2, 2, 2, **fields), TaskQuota("t1", 1, 2, 2)]  # type: ignore[arg-type]
    return Ledger(quotas, StalenessWindow(0), FailurePolicy(attempts=1, lease_s=10.0, batches=2))


def test_a_group_without_signal_gives_its_slot_to_another_and_is_counted() -> None:
    ledger = _filtering(replace_flat=True)
    first, second, other = ledger.admit(served=0, now=0.0)
    finish_all(ledger, [second, other], 0)
    for attempt in first:
        finish(ledger, attempt, 0, value=0.5)
    assert ledger.form_batch() is None and ledger.fates == {"no_signal": 2}
    (again,) = ledger.admit(served=0, now=0.0)
    assert [str(a) for a in again] == ["train/t0/2/0/0", "train/t0/2/1/0"]
    finish_all(ledger, [again], 0)
    batch = ledger.form_batch()
    assert batch is not None and [g.episode.index for g in batch.groups] == [1, 2, 0]
    assert sorted(fate for _, _, fate in ledger.settle(batch).fates) == ["no_signal"] * 2 + ["trained"] * 6


@pytest.mark.parametrize(("share", "dropped"), [(1.0, 0), (0.5, 0), (0.49, 2), (0.0, 2)])
def test_a_group_of_which_too_many_ran_over_their_budget_is_dropped(share: float, dropped: int) -> None:
    ledger = _filtering(long_share=share)
    first = ledger.admit(served=0, now=0.0)[0]
    finish(ledger, first[0], 0, value=1.0, outcome="over_length")
    finish(ledger, first[1], 0, value=0.0)
    assert ledger.fates["too_long"] == dropped
    assert len(ledger.admit(served=0, now=0.0)) == dropped // 2


def test_a_group_that_a_given_up_member_completes_is_filtered_too() -> None:
    ledger = Ledger([TaskQuota("t0", 1, 3, 2, replace_flat=True)], StalenessWindow(0), FailurePolicy(attempts=1))
    (group,) = ledger.admit(served=0, now=0.0)
    for attempt in group[:2]:
        finish(ledger, attempt, 0, value=1.0)
    assert ledger.failed(group[2], "environment", 0.0)
    assert ledger.fates == {"failed": 1, "no_signal": 2} and len(ledger.admit(served=0, now=0.0)) == 1


def test_a_task_of_which_the_filters_leave_nothing_is_hopeless_however_well_others_do() -> None:
    ledger = _filtering(replace_flat=True, long_share=0.0)
    for round_ in range(4):
        assert ledger.hopeless() is None
        group = ledger.admit(served=0, now=0.0)[0]
        outcome: Outcome = "over_length" if round_ == 1 else "terminated"
        for attempt in group:
            finish(ledger, attempt, 0, value=0.5, outcome=outcome)
    assert ledger.hopeless() == "the filters of t0 left nothing of its last 4 groups (no_signal 3, too_long 1)"


def test_a_group_that_passes_the_filters_is_hope() -> None:
    ledger = _filtering(replace_flat=True)
    for _ in range(3):
        for attempt in ledger.admit(served=0, now=0.0)[0]:
            finish(ledger, attempt, 0, value=0.5)
    open_ = [a for a in ledger.running() if a.episode.task == "t0"]
    finish_all(ledger, [open_[:2]], 0)
    for attempt in ledger.admit(served=0, now=0.0)[0]:
        finish(ledger, attempt, 0, value=0.5)
    assert ledger.hopeless() is None


def test_a_cut_goes_through_json_and_the_restored_ledger_goes_on_alike() -> None:
    ledger = make(alpha=1, quota=2)
    groups = ledger.admit(served=0, now=0.0)
    finish_all(ledger, groups[:3], 0)
    batch = ledger.form_batch()
    assert batch is not None
    ledger.settle(batch)
    cut = CUT.validate_json(CUT.dump_json(ledger.cut()))
    restored = Ledger.restore(cut, list(ledger.quotas.values()), ledger.window, ledger.policy, lineage=1)
    assert restored.running() == ledger.running() == groups[3]
    assert restored.fates == ledger.fates and restored.next_step == 1 and restored.lineage == 1
    assert [g[0].episode.index for g in restored.admit(served=1, now=0.0)] == [4, 5]
    finish_all(restored, groups[3:], 0)
    again = restored.form_batch()
    assert again is not None and again.lineage == 1 and [g.episode.index for g in again.groups] == [2, 3]


def test_a_fate_decided_between_a_step_and_its_checkpoint_is_settled_once_after_a_resume() -> None:
    ledger = make(alpha=1, quota=1, attempts=1)
    groups = ledger.admit(served=0, now=0.0)
    finish_all(ledger, groups[:1], 0)
    batch = ledger.form_batch()
    assert batch is not None
    ledger.settle(batch)
    lost, mate = groups[1]
    ledger.failed(lost, "environment", now=1.0)
    restored = Ledger.restore(CUT.validate_json(CUT.dump_json(ledger.cut())), list(ledger.quotas.values()), ledger.window, ledger.policy, lineage=1)
    finish_all(restored, restored.admit(served=1, now=2.0), 1)
    batch = restored.form_batch()
    assert batch is not None
    decided = [(attempt, fate) for attempt, _, fate in restored.settle(batch).fates]
    assert decided[:2] == [(lost, "failed"), (mate, "group_short")] and [fate for _, fate in decided[2:]] == ["trained", "trained"]
    assert restored.settle(Batch(1, 2, ())).fates == []


@pytest.mark.parametrize("seed", range(50))
def test_under_random_schedules_every_member_has_one_fate_and_nothing_trained_is_over_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    alpha = rng.choice([0, 1, 2, 3])
    ledger = make(alpha=alpha, quota=rng.choice([1, 2, 3]), size=rng.choice([2, 4]), min_members=2, attempts=2, tasks=2)
    version, fated, admitted, steps = 0, [], 0, 0
    admitted += sum(map(len, ledger.admit(version, 0.0)))
    started: dict[Attempt, int] = {}
    while steps < 12:
        running = ledger.running()
        for attempt in running:
            started.setdefault(attempt, version)
        if running:
            attempt = rng.choice(running)
            if rng.random() < 0.1:
                ledger.failed(attempt, "environment", 0.0)
                ledger.due(0.0)
            else:
                age = version - started[attempt]
                finish(ledger, attempt, started[attempt], rng.random(), outcome="over_age" if age > alpha else "terminated")
        batch = ledger.form_batch()
        if batch is not None:
            assert all(batch.step - m.receipt.first_version <= alpha for m in batch.members)
            assert {t: sum(g.episode.task == t for g in batch.groups) for t in ledger.quotas} == {t: q.quota for t, q in ledger.quotas.items()}
            fated += ledger.settle(batch).fates
            steps += 1
            version += 1
        admitted += sum(map(len, ledger.admit(version, 0.0)))
    members = [(a.episode, a.member) for a, _, _ in fated]
    assert len(members) == len(set(members))
    open_members = sum(len(g.members) for g in ledger.cut().open)
    assert admitted == sum(ledger.fates.values()) + open_members - sum(m.state == "dropped" for g in ledger.cut().open for m in g.members)


def test_what_became_of_members_is_told_by_task_with_the_tokens_that_they_had() -> None:
    ledger = make(alpha=0, quota=2, attempts=1, tasks=2)
    kept, lost, mine, failing = ledger.admit(served=0, now=0.0)
    finish_all(ledger, [kept, mine], 0)
    finish(ledger, lost[0], 0, outcome="over_age")
    finish(ledger, failing[0], 0)
    ledger.failed(failing[1], "environment", 0.0)
    replaced = ledger.admit(served=0, now=0.0)
    finish_all(ledger, replaced, 0)
    batch = ledger.form_batch()
    assert batch is not None
    ledger.settle(batch)
    told = {task: {fate: (t.members, t.played, t.sampled) for fate, t in of_task.items()} for task, of_task in ledger.tallies.by_task.items()}
    assert told == {
        "t0": {"trained": (4, 4, 8), "over_age": (2, 1, 2)},  # the other was still playing: it left nothing
        "t1": {"trained": (4, 4, 8), "failed": (1, 0, 0), "group_short": (1, 1, 2)},
    }
    assert ledger.fates == {"trained": 8, "over_age": 2, "failed": 1, "group_short": 1}
    assert CUT.validate_json(CUT.dump_json(ledger.cut())).tallies == ledger.tallies.by_task
