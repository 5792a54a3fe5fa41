"""The ledger: every episode and attempt, exactly once, from planned to trained or dropped-because.

Owns the plan (which episode comes next, for which task) and the state of every group that was admitted and is not yet in a batch.
It does no I/O and reads no clock: events come in with the time, attempts to dispatch and batches go out. The live coordinator
and a simulation feed the same object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rollart.control.staleness import StalenessWindow
from rollart.types import Attempt, Batch, Episode, Group, Member, Receipt, Score

Fate = Literal["trained", "no_signal", "too_long", "failed", "group_short", "over_age", "too_stale", "lineage"]
"""Where a member ended: trained on; its group's scores were all equal; too many of its group ran over their token budget; its attempts ran
out; its group fell below `min_members`; stopped at a turn since it had outlived the window; outlived it before a batch took it; sampled by
an abandoned lineage."""

MemberState = Literal["running", "scored", "dropped"]


class LedgerError(RuntimeError):
    """An event that contradicts what the ledger knows, which only a defect in its caller can cause."""


@dataclass(frozen=True, slots=True)
class TaskQuota:
    """A task's share of the plan: `quota` groups a batch, `group_size` members a group, of which `min_members` must survive.

    And which groups are worth a step: with `spread`, one whose members all scored the same teaches nothing, and with `replace_flat`
    another is played in its place; one of which more than `long_share` ran over their token budget is always replaced.
    """

    task: str
    quota: int
    group_size: int
    min_members: int
    spread: bool = True
    replace_flat: bool = False
    long_share: float = 1.0

    def teaches(self, group: Group) -> bool:
        """Whether there is something to learn from the scores of `group`."""
        return group.has_signal or not self.spread


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """`attempts`: tries at a member before it is given up; `lease_s`: seconds after which a silent attempt counts as failed; `batches`: so many
    batches' worth of a task's groups in a row may be filtered out before there is no hope for it."""

    attempts: int = 3
    lease_s: float = 600.0
    batches: int = 10


@dataclass(slots=True)
class OpenMember:
    """A member of an admitted group: its current attempt, and receipt and score once it has them."""

    attempt: Attempt
    deadline: float
    state: MemberState = "running"
    receipt: Receipt | None = None
    score: Score | None = None


@dataclass(slots=True)
class OpenGroup:
    """An admitted group. `admitted_at`: the version served then, a lower bound for the version of its first token."""

    episode: Episode
    admitted_at: int
    members: list[OpenMember]

    @property
    def complete(self) -> bool:
        return all(m.state != "running" for m in self.members)

    @property
    def survivors(self) -> list[Member]:
        return [Member(m.receipt, m.score) for m in self.members if m.receipt is not None and m.score is not None]

    @property
    def scored(self) -> Group:
        """What a batch would take of it."""
        return Group(self.episode, tuple(self.survivors))

    @property
    def oldest(self) -> int:
        """The first version of its oldest scored member, or the bound while one is still running."""
        if not self.complete:
            return self.admitted_at
        return min(m.receipt.first_version for m in self.survivors)


@dataclass(slots=True)
class LedgerCut:
    """All that a resumed run needs of the ledger, as plain data: counters, open groups, fates so far and which of them no settlement holds."""

    lineage: int
    next_step: int
    next_index: dict[str, int]
    open: list[OpenGroup]
    fates: dict[str, int]
    late: int
    unsettled: list[tuple[Attempt, str, Fate]] = field(default_factory=list)


@dataclass(slots=True)
class Settlement:
    """What became of members since the last one, as (attempt, nonce, fate); one is committed with every batch."""

    fates: list[tuple[Attempt, str, Fate]] = field(default_factory=list)


class Ledger:
    """Plans episodes, follows attempts, forms batches. `quotas` fixes the order of tasks; `step` is the version to start from."""

    def __init__(self, quotas: Sequence[TaskQuota], window: StalenessWindow, policy: FailurePolicy, lineage: int = 0, step: int = 0) -> None:
        self.quotas = {q.task: q for q in quotas}
        self.window = window
        self.policy = policy
        self.lineage = lineage
        self.next_step = step
        self.late = 0
        self.fates: Counter[str] = Counter()
        self._filtered: dict[str, Counter[str]] = {q.task: Counter() for q in quotas}
        self._next_index = {q.task: 0 for q in quotas}
        self._open: dict[Episode, OpenGroup] = {}
        self._unsettled: list[tuple[Attempt, str, Fate]] = []

    # ---- work goes out

    def admit(self, served: int, now: float) -> list[list[Attempt]]:
        """Plans as many new groups as the window can use, given the oldest version served, and returns their attempts by group."""
        groups: list[list[Attempt]] = []
        for task, q in self.quotas.items():
            ahead = sum(1 for e in self._open if e.task == task)
            for _ in range(self.window.admissible(next_step=self.next_step, served=served, quota=q.quota, ahead=ahead)):
                episode = Episode(task, self._next_index[task])
                self._next_index[task] += 1
                attempts = [Attempt(episode, member) for member in range(q.group_size)]
                deadline = now + self.policy.lease_s
                self._open[episode] = OpenGroup(episode, served, [OpenMember(a, deadline) for a in attempts])
                groups.append(attempts)
        return groups

    def running(self) -> list[Attempt]:
        """Attempts whose end is awaited: what a resumed run dispatches again, and what a watchdog names."""
        return [m.attempt for g in self._open.values() for m in g.members if m.state == "running"]

    def renew(self, attempts: Iterable[Attempt], now: float) -> None:
        """Starts the leases of these attempts anew, after they were dispatched again."""
        for attempt in attempts:
            member = self._running_member(attempt)
            if member is not None:
                member.deadline = now + self.policy.lease_s

    def overdue(self, now: float) -> list[Attempt]:
        """Running attempts whose lease has ended."""
        return [m.attempt for g in self._open.values() for m in g.members if m.state == "running" and m.deadline <= now]

    # ---- events come in

    def scored(self, receipt: Receipt, score: Score) -> bool:
        """An attempt stands durable and scored. False if it is none that is awaited (late, or already recorded): it is counted, not used.

        LedgerError if the two are of different executions. An attempt stopped for its age takes its whole group with it; a group that is
        complete then goes through its task's filters.
        """
        if (receipt.attempt, receipt.nonce) != (score.attempt, score.nonce):
            raise LedgerError(f"receipt of {receipt.attempt} ({receipt.nonce}) and score of {score.attempt} ({score.nonce}) must be of one execution")
        member = self._running_member(receipt.attempt)
        if member is None or receipt.lineage > self.lineage:
            self.late += 1
            return False
        member.receipt, member.score, member.state = receipt, score, "scored"
        group = self._open[receipt.attempt.episode]
        if receipt.outcome == "over_age":
            self._drop_group(group, "over_age")
        else:
            self._filter(group)
        return True

    def failed(self, attempt: Attempt, now: float) -> Attempt | None:
        """An attempt ended without a scored trajectory. Returns the attempt to dispatch next, or None when the member is given up."""
        member = self._running_member(attempt)
        if member is None:
            self.late += 1
            return None
        if attempt.number + 1 < self.policy.attempts:
            member.attempt, member.deadline = attempt.retried(), now + self.policy.lease_s
            return member.attempt
        member.state = "dropped"
        self._note(member, "failed")
        group = self._open[attempt.episode]
        if sum(m.state != "dropped" for m in group.members) < self.quotas[attempt.episode.task].min_members:
            self._drop_group(group, "group_short")
        else:
            self._filter(group)
        return None

    def hopeless(self) -> str | None:
        """Which task's filters leave nothing, and why, in words: more of them would go the same way; None while there is hope."""
        for task, reasons in self._filtered.items():
            if sum(reasons.values()) >= self.policy.batches * self.quotas[task].quota:
                told = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
                return f"the filters of {task} left nothing of its last {sum(reasons.values())} groups ({told})"
        return None

    # ---- batches

    def form_batch(self) -> Batch | None:
        """The batch of the next step, once every task's quota of complete groups is there; None while it is not.

        Groups that must be taken now, since the next step would be too late, go first and hold the step while they are not
        complete; then the lowest index goes first. Groups that have outlived the window are dropped.
        """
        step = self.next_step
        for group in [g for g in self._open.values() if g.complete and self.window.expired(g.oldest, step)]:
            self._drop_group(group, "too_stale")
        taken: list[OpenGroup] = []
        for task, q in self.quotas.items():
            chosen = self._choose(task, q.quota, step)
            if chosen is None:
                return None
            taken += chosen
        for group in taken:
            del self._open[group.episode]
        self.next_step = step + 1
        return Batch(self.lineage, step, tuple(g.scored for g in taken))

    def teaching(self, batch: Batch) -> Batch:
        """The batch without the groups from which there is nothing to learn: what the trainer gets of it."""
        return replace(batch, groups=tuple(g for g in batch.groups if self.quotas[g.episode.task].teaches(g)))

    def _choose(self, task: str, quota: int, step: int) -> list[OpenGroup] | None:
        groups = sorted((g for g in self._open.values() if g.episode.task == task), key=lambda g: g.episode.index)
        due = [g for g in groups if self.window.must_take(g.oldest, step)][:quota]
        due_episodes = {g.episode for g in due}
        rest = [g for g in groups if g.complete and g.episode not in due_episodes]
        chosen = due + rest[: quota - len(due)]
        if len(chosen) < quota or not all(g.complete for g in chosen):
            return None
        return sorted(chosen, key=lambda g: g.episode.index)

    def awaited(self) -> dict[str, int]:
        """Complete groups still missing from the next batch, by task; empty when it can be formed."""
        missing = {}
        for task, q in self.quotas.items():
            complete = sum(1 for g in self._open.values() if g.episode.task == task and g.complete)
            if self._choose(task, q.quota, self.next_step) is None:
                missing[task] = max(1, q.quota - complete)
        return missing

    def settle(self, batch: Batch) -> Settlement:
        """Notes that the step consumed `batch`, and hands out every fate decided since the last settlement."""
        for group in batch.groups:
            fate: Fate = "trained" if self.quotas[group.episode.task].teaches(group) else "no_signal"
            for m in group.members:
                self._unsettled.append((m.receipt.attempt, m.receipt.nonce, fate))
                self.fates[fate] += 1
        settlement = Settlement(self._unsettled)
        self._unsettled = []
        return settlement

    # ---- stop and resume

    def held(self) -> list[Receipt]:
        """Receipts of scored members that no batch has taken yet: a resumed run may train on them."""
        return [m.receipt for g in self._open.values() for m in g.members if m.state == "scored" and m.receipt is not None]

    def cut(self) -> LedgerCut:
        """The state between two steps, to be stored with a checkpoint; a batch that was formed and not settled would be lost."""
        return LedgerCut(
            self.lineage, self.next_step, dict(self._next_index), list(self._open.values()), dict(self.fates), self.late, list(self._unsettled)
        )  # fmt: skip

    @classmethod
    def restore(cls, cut: LedgerCut, quotas: Sequence[TaskQuota], window: StalenessWindow, policy: FailurePolicy, lineage: int) -> Ledger:
        """The ledger that goes on from `cut` as lineage `lineage`; tasks that the cut does not know start at their first episode."""
        ledger = cls(quotas, window, policy, lineage, cut.next_step)
        ledger._next_index |= {t: i for t, i in cut.next_index.items() if t in ledger._next_index}
        ledger._open = {g.episode: g for g in cut.open if g.episode.task in ledger.quotas}
        ledger.fates = Counter(cut.fates)
        ledger.late = cut.late
        ledger._unsettled = list(cut.unsettled)
        return ledger

    # ---- inside

    def _running_member(self, attempt: Attempt) -> OpenMember | None:
        group = self._open.get(attempt.episode)
        if group is None:
            return None
        member = group.members[attempt.member]
        return member if member.attempt == attempt and member.state == "running" else None

    def _note(self, member: OpenMember, fate: Fate) -> None:
        self.fates[fate] += 1
        self._unsettled.append((member.attempt, member.receipt.nonce if member.receipt else "", fate))

    def _filter(self, group: OpenGroup) -> None:
        """Drops a complete group that is not worth a step, so that its slot is free for another."""
        if not group.complete:
            return
        quota, members = self.quotas[group.episode.task], group.survivors
        reason: Fate | None = None
        if sum(m.receipt.outcome == "over_length" for m in members) > quota.long_share * len(members):
            reason = "too_long"
        elif quota.replace_flat and not quota.teaches(group.scored):
            reason = "no_signal"
        if reason is None:
            self._filtered[group.episode.task].clear()
            return
        self._filtered[group.episode.task][reason] += 1
        self._drop_group(group, reason)

    def _drop_group(self, group: OpenGroup, fate: Fate) -> None:
        """Drops a group whole; members that were dropped before keep their own fate."""
        del self._open[group.episode]
        for member in group.members:
            if member.state != "dropped":
                self._note(member, fate)
