"""The record of who runs a run now, `ledger/lease.json`; owns how it is read, judged and written, and excludes nobody for sure.

Stores have no way to write a record only if it is still the same, so this one keeps a second start from getting in the way of a first. What
a coordinator may commit is decided by the run's ledger alone. Times are those of the holders' own clocks.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from rollart.config import ConfigError
from rollart.journal import LEDGER
from rollart.processes import Process, is_gone
from storage.errors import ObjectMissing
from storage.objects.store import ObjectStore

RECORD = f"{LEDGER}/lease.json"

AHEAD_S = 60.0
"""How far a holder's clock may be ahead of the one that it is judged by: further, and its record would hold for as long after it is gone."""


class RunHeld(ConfigError):
    """Another process runs this run."""


@dataclass(frozen=True, slots=True)
class Lease:
    """`by` runs the run as coordinator `number` since `since`, and said so lastly at `renewed`, for `seconds` (times in unix seconds)."""

    number: int
    by: Process
    since: float
    renewed: float
    seconds: float

    def holds(self, now: float) -> bool:
        """Whether that is still to be believed: not of a process that is known to have ended, nor of one that has been silent for too long, nor of
        one whose clock says nothing here."""
        return -AHEAD_S < now - self.renewed < self.seconds and not is_gone(self.by)


_LEASE = TypeAdapter(Lease)


def read(store: ObjectStore) -> Lease | None:
    """The record of the run in `store`; None if there is none, or none that can be read: it is written anew all the time."""
    try:
        return _LEASE.validate_json(store.read(RECORD))
    except (ObjectMissing, ValidationError):
        return None


def write(store: ObjectStore, lease: Lease) -> bool:
    """Puts the record, unless a later coordinator's is there; whether it was put."""
    if (held := read(store)) is not None and held.number > lease.number:
        return False
    store.write(RECORD, json.dumps(dataclasses.asdict(lease)).encode())
    return True


def release(store: ObjectStore, number: int) -> None:
    """Removes the record of coordinator `number`, if it is still that one's."""
    if (held := read(store)) is not None and held.number == number:
        store.delete(RECORD)


def refuse_if_held(store: ObjectStore) -> None:
    """RunHeld, saying by whom, since when and what to do, if another process runs the run in `store`."""
    held, now = read(store), time.time()
    if held is None or not held.holds(now):
        return
    raise RunHeld(
        f"{store.url} is run by {held.by} since {clock(held.since)} (coordinator {held.number}, last heard of {max(0.0, now - held.renewed):.0f} s "
        f"ago): stop it first, with Ctrl-C there, or give this run another name; once it has been silent for {held.seconds:g} s (run.lease) "
        "the run can be gone on with"
    )


def clock(at: float) -> str:
    """A unix time as people write it here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
