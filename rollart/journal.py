"""The run's ledger as a log in its store: entries `ledger/00000012.json`, numbered over the whole run, each put only if absent.

Names, spells and reads the entries. What it means that a number is taken, and who may append, is for others to decide.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollart.config import ConfigError
from rollart.processes import Process
from storage.objects.store import ObjectStore

LEDGER = "ledger"
"""The part of a run's folder that holds the log."""

_NAME = re.compile(rf"{LEDGER}/([0-9]{{8,}})\.json")


class LedgerDamaged(ConfigError):
    """An entry of a run's ledger isn't what a run writes there."""


Fates = tuple[tuple[str, str, str], ...]
"""What became of attempts: (attempt as text, nonce of the execution, fate)."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A coordinator took the run over at `time` (unix seconds); the entry's number is that coordinator's."""

    by: Process
    time: float


@dataclass(frozen=True, slots=True)
class Trained:
    """Coordinator `coordinator` trained on the batch of step (`lineage`, `step`); `fates` are those decided since the entry before."""

    coordinator: int
    lineage: int
    step: int
    time: float
    fates: Fates


Entry = Opened | Trained

_KINDS: dict[str, TypeAdapter[Any]] = {"opened": TypeAdapter(Opened), "batch": TypeAdapter(Trained)}


class Journal:
    """The log of the run in `store`. Nothing of it is ever changed or removed."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """Where the run lies."""
        return self._store.url

    def numbers(self) -> list[int]:
        """The entries there are, ascending."""
        return sorted(int(found[1]) for path in self._store.list(LEDGER) if (found := _NAME.fullmatch(path)))

    def last(self) -> int:
        """The number of the newest entry; -1 if there is none."""
        return max(self.numbers(), default=-1)

    def has(self, number: int) -> bool:
        """Whether there is an entry of this number."""
        return self._store.exists(_path(number))

    def read(self, number: int) -> Entry:
        """One entry. ObjectMissing, LedgerDamaged."""
        data = self._store.read(_path(number))
        try:
            fields = json.loads(data)
            found: Entry = _KINDS[fields.pop("kind")].validate_python(fields)
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise LedgerDamaged(f"{self.url}/{_path(number)} is no entry of a run's ledger; what the run did can't be told any more") from error
        return found

    def append(self, number: int, entry: Entry) -> bool:
        """Puts `entry` as `number`; False if that is taken. Of any number of racing callers one gets True."""
        kind = "opened" if isinstance(entry, Opened) else "batch"
        return self._store.create(_path(number), json.dumps({"kind": kind, **dataclasses.asdict(entry)}).encode())

    def batches(self) -> list[Trained]:
        """The steps that count, in their order: those that a later lineage went back before are left out."""
        found: list[Trained] = []
        for entry in map(self.read, self.numbers()):
            if isinstance(entry, Trained):
                while found and found[-1].step >= entry.step:
                    found.pop()
                found.append(entry)
        return found

    def steps(self) -> int:
        """How many steps count. They have no gaps, so the newest one tells, and few entries are read."""
        for number in reversed(self.numbers()):
            entry = self.read(number)
            if isinstance(entry, Trained):
                return entry.step + 1
        return 0


def _path(number: int) -> str:
    return f"{LEDGER}/{number:08d}.json"
