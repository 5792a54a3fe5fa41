"""One coordinator a run: takes a run over, keeps the lease on it, and commits in its own name until another one has taken over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator

from rollart import lease
from rollart.journal import Fates, Journal, Opened, Trained
from rollart.lease import Lease, RunHeld, clock
from rollart.processes import this_process
from storage.errors import StoreError
from storage.objects.store import ObjectStore

log = logging.getLogger(__name__)

RENEWALS = 3
"""How often a lease is renewed within its length: one that comes late, or not at all, ends nothing."""

PROOF_S = 2.0
"""How long a look at the ledger that found nobody else there counts: for what is written right after it."""

_TRIES = 16
"""Entries that others may append while one is appended to take the run over: a coordinator commits a step in seconds, not in between these."""


class LedgerTaken(RuntimeError):
    """Another process has taken the run over."""


class Tenure:
    """This process is coordinator `number` of a run, and `last` is the newest entry of the run's ledger as it knows it.

    It appends at the number after that and at no other. If somebody else's entry is there, the run is somebody else's.
    """

    def __init__(self, store: ObjectStore, held: Lease) -> None:
        self._store, self._journal, self._lease = store, Journal(store), held
        self.number = self.last = held.number
        self._ours_until = -math.inf

    @classmethod
    def take(cls, store: ObjectStore, seconds: float) -> Tenure:
        """Takes the run in `store` over, with a lease of `seconds`; from here on whoever ran it before commits nothing. RunHeld."""
        lease.refuse_if_held(store)
        journal, me = Journal(store), this_process()
        for _ in range(_TRIES):
            number, now = journal.last() + 1, time.time()
            if journal.append(number, Opened(me, now)):
                break
        else:
            raise RunHeld(f"{store.url}: another process commits to its ledger all the time; stop that one first")
        tenure = cls(store, Lease(number, me, now, now, seconds))
        if not tenure.renew():
            tenure.check()
        return tenure

    def renew(self) -> bool:
        """Says that this process still runs the run; False if a later coordinator says so of itself."""
        sent = time.monotonic()
        if not lease.write(self._store, Lease(self.number, self._lease.by, self._lease.since, time.time(), self._lease.seconds)):
            self._ours_until = -math.inf
            return False
        self._ours_until = sent + self._lease.seconds
        return True

    def holds(self) -> bool:
        """Whether this process knows, without asking, that nobody else can have taken the run over: it may have been stopped for a while."""
        return time.monotonic() < self._ours_until

    def commit(self, lineage: int, step: int, fates: Fates) -> None:
        """Appends that step (`lineage`, `step`) was taken, which makes it count. LedgerTaken if the run is another's by now."""
        asked = time.monotonic()
        if not self._journal.append(self.last + 1, Trained(self.number, lineage, step, time.time(), fates)):
            raise self._taken()
        self.last += 1
        self._ours_until = max(self._ours_until, asked + PROOF_S)

    def check(self) -> None:
        """LedgerTaken if the run is another's by now."""
        asked = time.monotonic()
        if self._journal.has(self.last + 1):
            raise self._taken()
        self._ours_until = max(self._ours_until, asked + PROOF_S)

    def release(self) -> None:
        """Ends the lease, so that the run can be gone on with at once; a store that fails lets it end by itself."""
        try:
            lease.release(self._store, self.number)
        except StoreError as error:
            log.warning("the lease on %s ends by itself after %g s: %s", self._store.url, self._lease.seconds, error)

    def _taken(self) -> LedgerTaken:
        self._ours_until = -math.inf
        entry = self._journal.read(self.last + 1)
        if isinstance(entry, Opened):
            who = f"{entry.by}, its coordinator {self.last + 1} since {clock(entry.time)}"
        else:
            who = f"its coordinator {entry.coordinator}, which committed step {entry.step} at {clock(entry.time)}"
        return LedgerTaken(
            f"{self._store.url} was taken over by {who}; this process was its coordinator {self.number} and has ended: what it did since counts "
            "for nothing"
        )

    def keep(self, over: threading.Event) -> None:
        """Renews the lease until it is `over`. Whatever stands in the way, the next commit finds out what it means."""
        while not over.wait(self._lease.seconds / RENEWALS):
            try:
                if not self.renew():
                    log.warning("another process has taken %s over; this one ends at its next commit", self._store.url)
                    return
            except StoreError as error:
                log.warning("the lease on %s could not be renewed: %s", self._store.url, error)


@contextlib.asynccontextmanager
async def coordinating(store: ObjectStore, seconds: float) -> AsyncIterator[Tenure]:
    """Within, this process runs the run in `store`; see `Tenure.take`. The lease is renewed beside everything else, and released at the end."""
    tenure = await asyncio.to_thread(Tenure.take, store, seconds)
    over = threading.Event()
    # A thread of its own: neither the loop nor whatever else waits for a thread makes this one late.
    keeping = threading.Thread(target=tenure.keep, args=(over,), name="lease", daemon=True)
    keeping.start()
    try:
        yield tenure
    finally:
        over.set()
        await asyncio.to_thread(keeping.join)
        await asyncio.to_thread(tenure.release)
