"""The ledger: every episode and attempt, exactly once, from planned to trained or dropped-because.

Owns the plan (which episode comes next, for which task) and the state of every group that was admitted and is not yet in a batch.
It does no I/O and reads no clock: events come in with the time, attempts to dispatch, attempts to stop and batches go out. The live
coordinator and a simulation feed the same object.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from rollart.control.cut import Fate, LedgerCut, Settlement
from rollart.control.failures import Cause, FailurePolicy
from rollart.control.groups import OpenGroup, OpenMember, Try
from rollart.control.quotas import ShortRule, TaskQuota, choose, missing
from rollart.control.redundancy import Delays, Redundancy
from rollart.control.staleness import StalenessWindow
from rollart.control.tallies import Tallies
from rollart.types import Attempt, Batch, Episode, Receipt, Score

LOOK_S = 0.5
"""Between two looks at which attempts are so late that they get a spare: a pass over everything in flight."""


class LedgerError(RuntimeError):
    """An event that contradicts what the ledger knows, which only a defect in its caller can cause."""


class Ledger:
    """Plans episodes, follows attempts, forms batches. `quotas` fixes the order of tasks; `step` is the version to start from.

    `ends` counts how attempts ended: `scored`, `failed:CAUSE`, `yielded` (to another try at the same member) or `stopped` (nobody wants its
    member any more). Each attempt that went out ends there exactly once; what is heard of it afterwards is counted as `late`.
    """

    def __init__(
        self, quotas: Sequence[TaskQuota], window: StalenessWindow, policy: FailurePolicy, lineage: int = 0, step: int = 0, *,
        redundancy: Redundancy | None = None, short: ShortRule = "wait",
    ) -> None:  # fmt: skip
        self.quotas = {q.task: q for q in quotas}
        self.window = window
        self.policy = policy
        self.redundancy = redundancy or Redundancy()
        self.short: ShortRule = short
        self.lineage = lineage
        self.next_step = step
        self.late = 0
        self.tallies = Tallies(self.quotas)
        self.ends: Counter[str] = Counter()
        self.delays = Delays()
        self._filtered: dict[str, Counter[str]] = {q.task: Counter() for q in quotas}
        self._next_index = {q.task: 0 for q in quotas}
        self._open: dict[Episode, OpenGroup] = {}
        self._ahead: Counter[str] = Counter()
        self._unformable = False
        self._next_look = -math.inf
        self._unsettled: list[tuple[Attempt, str, Fate]] = []
        self._resting: list[tuple[float, Episode, int]] = []
        self._stops: list[Attempt] = []

    @property
    def fates(self) -> Counter[str]:
        """Members by where they ended."""
        return self.tallies.fates

    # ---- work goes out

    def admit(self, served: int, now: float) -> list[list[Attempt]]:
        """Plans as many new groups as the window can use, given the oldest version served, and returns their attempts by group."""
        groups: list[list[Attempt]] = []
        for task, q in self.quotas.items():
            ahead = self._ahead[task]
            for _ in range(self.window.admissible(next_step=self.next_step, served=served, quota=q.quota, ahead=ahead)):
                episode = Episode(task, self._next_index[task])
                self._next_index[task] += 1
                members = [OpenMember(i) for i in range(self.redundancy.launched(q.group_size))]
                self._open[episode] = OpenGroup(episode, served, members)
                self._ahead[task] += 1
                groups.append([self._send(episode, member, now) for member in members])
        return groups

    def due(self, now: float) -> list[Attempt]:
        """Attempts that are to go out now besides: at members that have rested after a failure, and spares beside late ones."""
        found = []
        while self._resting and self._resting[0][0] <= now:
            _, episode, index = heapq.heappop(self._resting)
            group = self._open.get(episode)
            if group is not None and group.members[index].state == "running" and not group.members[index].tries:
                found.append(self._send(episode, group.members[index], now))
        return found + self._spares(now)

    def running(self) -> list[Attempt]:
        """Attempts whose end is awaited: what a resumed run dispatches again, and what a watchdog names."""
        return [t.attempt for _, m in self._members() for t in m.tries]

    def renew(self, attempts: Iterable[Attempt], now: float) -> None:
        """Starts the leases of these attempts anew: they go to the cluster only now, or again, or still wait for room there."""
        for attempt in attempts:
            if (out := self._out(attempt)) is not None:
                _, tried = out
                tried.since, tried.deadline, tried.begun = now, now + self.policy.lease_s, None

    def stops(self) -> list[Attempt]:
        """Attempts that are out and that nobody wants any more, told once: their tasks and requests are to be aborted."""
        found, self._stops = self._stops, []
        return found

    # ---- events come in

    def begun(self, attempt: Attempt, now: float) -> None:
        """The attempt asks an engine for its first token. Of two tries at a member the first to begin goes on, and the other yields."""
        if (out := self._out(attempt)) is None:
            return
        member, tried = out
        if tried.begun is not None:
            return
        if any(other.begun is not None for other in member.tries):
            self._stop(member, [tried], "yielded")
            return
        tried.begun = now
        self.delays.note(attempt.episode.task, now - tried.since)
        others = [other for other in member.tries if other is not tried]
        for other in others:
            self.delays.note(attempt.episode.task, now - other.since)  # at least so much: left out, the slow would seem rarer each time
        self._stop(member, others, "yielded")

    def scored(self, receipt: Receipt, score: Score) -> bool:
        """An attempt stands durable and scored. False if it is none that is awaited (late, or already recorded): it is counted, not used.

        LedgerError if the two are of different executions. An attempt stopped for its age takes its whole group with it; a group that is
        complete then goes through its task's filters.
        """
        if (receipt.attempt, receipt.nonce) != (score.attempt, score.nonce):
            raise LedgerError(f"receipt of {receipt.attempt} ({receipt.nonce}) and score of {score.attempt} ({score.nonce}) must be of one execution")
        out = self._out(receipt.attempt)
        if out is None or receipt.lineage > self.lineage:
            self.late += 1
            return False
        member, tried = out
        self.ends["scored"] += 1
        member.tries.remove(tried)
        self._stop(member, member.tries, "yielded")
        member.receipt, member.score, member.state = receipt, score, "scored"
        self._unformable = False
        group = self._open[receipt.attempt.episode]
        if receipt.outcome == "over_age":
            self._drop_group(group, "over_age")
            return True
        if len(group.survivors) >= self.quotas[group.episode.task].group_size:
            for late in [m for m in group.members if m.state == "running"]:
                self._drop(group, late, "spare", outlasted=receipt)
        self._filter(group)
        return True

    def failed(self, attempt: Attempt, cause: Cause, now: float) -> bool:
        """An attempt ended without a scored trajectory; False if it is none that is awaited. Its member is tried again (see `due`), or
        given up, whereupon its group goes on without it or is dropped."""
        out = self._out(attempt)
        if out is None:
            self.late += 1
            return False
        member, tried = out
        self.ends[f"failed:{cause}"] += 1
        member.tries.remove(tried)
        member.failures[cause] = member.failures.get(cause, 0) + 1
        if member.tries:
            return True
        if not self.policy.gives_up(member.failures):
            heapq.heappush(self._resting, (now + self.policy.rest(member.failures), attempt.episode, member.index))
            return True
        group = self._open[attempt.episode]
        self._drop(group, member, "failed", attempt)
        if sum(m.state != "dropped" for m in group.members) < self.quotas[attempt.episode.task].min_members:
            self._drop_group(group, "group_short")
        else:
            self._filter(group)
        return True

    def overdue(self, now: float) -> list[Attempt]:
        """The attempts whose lease has ended."""
        return [t.attempt for _, m in self._members() for t in m.tries if t.deadline <= now]

    def extend(self, attempts: Iterable[Attempt], now: float) -> None:
        """Gives these attempts another lease: somebody is at them."""
        for attempt in attempts:
            if (out := self._out(attempt)) is not None:
                out[1].deadline = now + self.policy.lease_s

    def expire(self, now: float) -> list[Attempt]:
        """Fails every attempt whose lease has ended, and has it stopped; returns them."""
        expired = [attempt for attempt in self.overdue(now) if self._out(attempt) is not None and self.failed(attempt, "lease", now)]
        self._stops += expired
        return expired

    def hopeless(self) -> str | None:
        """Which task's filters leave nothing, and why, in words: more of them would go the same way; None while there is hope."""
        for task, reasons in self._filtered.items():
            if sum(reasons.values()) >= self.policy.batches * self.quotas[task].quota:
                told = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
                return f"the filters of {task} left nothing of its last {sum(reasons.values())} groups ({told})"
        return None

    # ---- batches

    def form_batch(self) -> Batch | None:
        """The batch of the next step, once the groups that its rule wants are complete; None while they are not.

        Groups that have outlived the window are dropped.
        """
        if self._unformable:
            return None
        step = self.next_step
        for group in [g for g in self._open.values() if g.complete and self.window.expired(g.oldest, step)]:
            self._drop_group(group, "too_stale")
        taken = choose(self._open.values(), self.quotas, self.window, step, self.short)
        if taken is None:
            self._unformable = True
            return None
        for group in taken:
            self._close(group)
        self.next_step = step + 1
        return Batch(self.lineage, step, tuple(g.scored for g in taken))

    def teaching(self, batch: Batch) -> Batch:
        """The batch without the groups from which there is nothing to learn: what the trainer gets of it."""
        return replace(batch, groups=tuple(g for g in batch.groups if self.quotas[g.episode.task].teaches(g)))

    def awaited(self) -> dict[str, int]:
        """Complete groups still missing from the next batch, by task; empty when it can be formed."""
        return missing(self._open.values(), self.quotas, self.window, self.next_step, self.short)

    def settle(self, batch: Batch) -> Settlement:
        """Notes that the step consumed `batch`, and hands out every fate decided since the last settlement."""
        for group in batch.groups:
            fate: Fate = "trained" if self.quotas[group.episode.task].teaches(group) else "no_signal"
            for m in group.members:
                self._unsettled.append((m.receipt.attempt, m.receipt.nonce, fate))
                self.tallies.note(group.episode.task, fate, m.receipt)
        settlement = Settlement(self._unsettled)
        self._unsettled = []
        return settlement

    # ---- stop and resume

    def held(self) -> list[Receipt]:
        """Receipts of scored members that no batch has taken yet: a resumed run may train on them."""
        return [m.receipt for _, m in self._members() if m.state == "scored" and m.receipt is not None]

    def cut(self) -> LedgerCut:
        """The state between two steps, to be stored with a checkpoint; a batch that was formed and not settled would be lost."""
        return LedgerCut(
            self.lineage, self.next_step, dict(self._next_index), list(self._open.values()), self.tallies.by_task, self.late, list(self._unsettled),
            ends=dict(self.ends),
        )  # fmt: skip

    @classmethod
    def restore(
        cls, cut: LedgerCut, quotas: Sequence[TaskQuota], window: StalenessWindow, policy: FailurePolicy, lineage: int, *,
        redundancy: Redundancy | None = None, short: ShortRule = "wait",
    ) -> Ledger:  # fmt: skip
        """The ledger that goes on from `cut` as lineage `lineage`; tasks that the cut does not know start at their first episode.

        One try a member goes on, and what rested is tried again at once.
        """
        ledger = cls(quotas, window, policy, lineage, cut.next_step, redundancy=redundancy, short=short)
        ledger._next_index |= {t: i for t, i in cut.next_index.items() if t in ledger._next_index}
        ledger._open = {g.episode: g for g in cut.open if g.episode.task in ledger.quotas}
        ledger._ahead.update(episode.task for episode in ledger._open)
        ledger.tallies = Tallies(ledger.quotas, cut.tallies)
        ledger.late, ledger.ends = cut.late, Counter(cut.ends)
        ledger._unsettled = list(cut.unsettled)
        for group, member in ledger._members():
            member.tries, others = (tries := sorted(member.tries, key=lambda t: t.begun is None))[:1], tries[1:]
            ledger.ends["yielded"] += len(others)
            if member.state == "running" and not member.tries:
                ledger._resting.append((0.0, group.episode, member.index))
        heapq.heapify(ledger._resting)
        return ledger

    # ---- inside

    def _close(self, group: OpenGroup) -> None:
        del self._open[group.episode]
        self._ahead[group.episode.task] -= 1

    def _members(self) -> Iterator[tuple[OpenGroup, OpenMember]]:
        return ((g, m) for g in self._open.values() for m in g.members)

    def _out(self, attempt: Attempt) -> tuple[OpenMember, Try] | None:
        """The try of that attempt and its member, if it is out."""
        group = self._open.get(attempt.episode)
        if group is None:
            return None
        member = group.members[attempt.member]
        tried = member.find(attempt)
        return None if tried is None else (member, tried)

    def _send(self, episode: Episode, member: OpenMember, now: float) -> Attempt:
        attempt = Attempt(episode, member.index, member.tried)
        member.tried += 1
        member.tries.append(Try(attempt, now, now + self.policy.lease_s))
        return attempt

    def _spares(self, now: float) -> list[Attempt]:
        """Second tries for those that have waited for their first token longer than most, the longest first."""
        found: list[Attempt] = []
        if self.redundancy.rule != "before_first_token" or now < self._next_look:
            return found
        self._next_look = now + LOOK_S
        patience = {task: self.delays.quantile(task, self.redundancy.patience) for task in self.quotas}
        for group in self._open.values():
            limit = patience[group.episode.task]
            if limit is None:
                continue
            left = self.redundancy.spares(self.quotas[group.episode.task].group_size) - group.spares
            late = [m for m in group.members if len(m.tries) == 1 and m.tries[0].begun is None and now - m.tries[0].since > limit]
            for member in sorted(late, key=lambda m: m.tries[0].since)[: max(0, left)]:
                found.append(self._send(group.episode, member, now))
        return found

    def _stop(self, member: OpenMember, tries: Sequence[Try], end: Literal["yielded", "stopped"]) -> None:
        """Takes back `tries` at a member."""
        for tried in list(tries):
            member.tries.remove(tried)
            self.ends[end] += 1
            self._stops.append(tried.attempt)

    def _drop(self, group: OpenGroup, member: OpenMember, fate: Fate, attempt: Attempt | None = None, outlasted: Receipt | None = None) -> None:
        """Gives a member up; `attempt` is the one that decided it, if one did, and `outlasted` what another one came to meanwhile."""
        if attempt is None:
            attempt = member.receipt.attempt if member.receipt else Attempt(group.episode, member.index, max(0, member.tried - 1))
        self._stop(member, member.tries, "stopped")
        self.tallies.note(group.episode.task, fate, member.receipt, outlasted)
        self._unsettled.append((attempt, member.receipt.nonce if member.receipt else "", fate))
        member.state = "dropped"
        self._unformable = False

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
        self._close(group)
        for member in group.members:
            if member.state != "dropped":
                self._drop(group, member, fate)
