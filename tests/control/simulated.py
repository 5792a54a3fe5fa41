"""A cluster in virtual time, drawn from a seed, that plays what a ledger plans: slow, lossy, late and now and then started anew."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from rollart.control.cut import LedgerCut
from rollart.control.failures import Cause, FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import TaskQuota
from rollart.control.redundancy import Redundancy
from rollart.control.staleness import StalenessWindow
from rollart.types import Attempt, Batch, Outcome, Receipt, Score

CUT = TypeAdapter(LedgerCut)
CAUSES: tuple[Cause, ...] = ("environment", "reward", "generation", "machine")


@dataclass(order=True)
class Event:
    """Something that happens to an attempt at a time; `run` tells executions of resumed runs apart."""

    at: float
    order: int
    kind: str = field(compare=False)
    attempt: Attempt = field(compare=False)
    first: int = field(compare=False, default=0)
    run: int = field(compare=False, default=0)


class Simulation:
    """One seeded schedule. `step_until` plays it until so many batches were trained on; what it saw is kept for a test to judge."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.alpha = rng.choice([0, 1, 2, 3])
        self.quotas = [
            TaskQuota(f"t{i}", rng.choice([1, 2, 3]), size := rng.choice([2, 4]), rng.randint(2, size), replace_flat=rng.random() < 0.3,
                      long_share=rng.choice([1.0, 0.5]))
            for i in range(rng.choice([1, 2]))
        ]  # fmt: skip
        self.policy = FailurePolicy(
            rng.choice([1, 2, 3]), lease_s=rng.choice([20.0, 200.0]), batches=10**9, machine_attempts=4, rest_s=rng.choice([0, 1.0])
        )
        self.redundancy = Redundancy(rng.choice(["none", "before_first_token", "first_finished"]), rng.choice([1.0, 1.3, 2.0]), 0.5)
        self.options = {"redundancy": self.redundancy, "short": rng.choice(["wait", "fill"])}
        self.trouble = rng.choice([0.0, 0.1, 0.3])
        self.ledger = Ledger(self.quotas, StalenessWindow(self.alpha), self.policy, **self.options)
        self.now, self.version, self.run, self.order = 0.0, 0, 0, 0
        self.events: list[Event] = []
        self.out: set[Attempt] = set()  # attempts that the cluster plays
        self.sent = 0
        self.first: dict[tuple[Attempt, int], int] = {}  # version of the first token, by attempt and run
        self.batches: list[Batch] = []
        self.fates: list[tuple[Attempt, str, str]] = []
        self.settled_at_cut: tuple[int, LedgerCut, int] | None = None

    # ---- the cluster

    def send(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            assert attempt not in self.out, f"{attempt} went out twice"
            self.out.add(attempt)
            self.sent += 1
            reset, run = self.rng.expovariate(1.0), self.rng.lognormvariate(1.0, 1.0)
            fails = self.rng.random() < self.trouble
            if fails and self.rng.random() < 0.3:
                continue  # never heard of again: only its lease ends it
            if fails:
                self.at(self.rng.random() * (reset + run), "fail", attempt)
                continue
            self.at(reset, "begin", attempt)
            self.at(reset + run, "finish", attempt)
            if self.rng.random() < self.trouble:
                self.at(reset + run + 1.0, "finish", attempt)  # Dask runs a lost future again: the same attempt ends twice

    def at(self, delay: float, kind: str, attempt: Attempt) -> None:
        self.order += 1
        heapq.heappush(self.events, Event(self.now + delay, self.order, kind, attempt, self.version, self.run))

    def happens(self, event: Event) -> None:
        ledger, attempt = self.ledger, event.attempt
        if event.kind == "begin":
            self.first[attempt, event.run] = self.version
            ledger.begun(attempt, self.now)
        elif event.kind == "fail":
            self.out.discard(attempt)
            ledger.failed(attempt, self.rng.choice(CAUSES), self.now)
        else:
            self.out.discard(attempt)
            first = self.first.get((attempt, event.run), event.first)
            stale = self.version - first > self.alpha
            outcome: Outcome = "over_age" if stale else self.rng.choice(["terminated", "terminated", "over_length"])
            receipt = Receipt(attempt, f"{attempt}@{event.order}", ledger.lineage, "f", 0, outcome, first, self.version, 4, 2, 1)
            ledger.scored(receipt, Score(attempt, receipt.nonce, self.rng.choice([0.0, 1.0])))

    # ---- the coordinator

    def step_until(self, steps: int, patience: int = 20_000) -> None:
        self.go_on()
        for _ in range(patience):
            if len(self.batches) >= steps:
                return
            tick = self.now + 1.0
            if self.events and self.events[0].at <= tick:
                event = heapq.heappop(self.events)
                self.now = max(self.now, event.at)
                if (event.run == self.run and event.attempt in self.out) or event.kind == "finish":
                    self.happens(event)
            else:
                self.now = tick
                self.ledger.expire(self.now)
            self.go_on()
            if self.order % 4 == 0:
                self.check()
        raise AssertionError(f"stuck after {len(self.batches)} steps: {self.ledger.awaited()}, {self.ledger.running()[:3]}")

    def go_on(self) -> None:
        for attempt in self.ledger.stops():
            assert attempt not in self.ledger.running()
            self.out.discard(attempt)
        batch = self.ledger.form_batch()
        if batch is not None:
            self.batches.append(batch)
            self.fates += self.ledger.settle(batch).fates
            self.version = batch.step + 1
            if self.rng.random() < 0.2:
                self.settled_at_cut = len(self.batches), CUT.validate_json(CUT.dump_json(self.ledger.cut())), self.sent
        self.send([a for group in self.ledger.admit(self.version, self.now) for a in group] + self.ledger.due(self.now))

    def resume(self) -> None:
        """The run is killed and gone on from its last checkpoint, as another lineage; what was after it is as if it had never been."""
        if self.settled_at_cut is None:
            return
        kept, cut, sent = self.settled_at_cut
        self.run += 1
        self.batches = self.batches[:kept]
        trained = {(m.receipt.attempt, m.receipt.nonce) for b in self.batches for m in b.members}
        self.fates = [f for f in self.fates if (f[0], f[1]) in trained or f[2] not in ("trained", "no_signal")]
        self.ledger = Ledger.restore(cut, self.quotas, StalenessWindow(self.alpha), self.policy, cut.lineage + 1, **self.options)
        self.version, self.out, self.events = cut.next_step, set(), []
        running = self.ledger.running()
        self.ledger.renew(running, self.now)
        self.sent = sent - len(running)
        self.send(running)
        self.check()

    # ---- what always holds

    def check(self) -> None:
        ledger = self.ledger
        running = Counter(ledger.running())
        assert all(n == 1 for n in running.values())
        assert sum(ledger.ends.values()) + len(running) == self.sent, (ledger.ends, len(running), self.sent)
        limit = {q.task: self.redundancy.launched(q.group_size) + self.redundancy.spares(q.group_size) for q in self.quotas}
        by_group = Counter(a.episode for a in running)
        assert all(n <= limit[e.task] for e, n in by_group.items())
