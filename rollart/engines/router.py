"""Chooses the engine for a request from a table that is pushed to the caller; pure, so that the planner can run it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.engines.errors import NoEngine
from storage.version import Version

__all__ = ["Choice", "EngineEntry", "EngineTable", "choose", "pick"]


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine that serves `version` at `url`, and how many requests (`load`) it had when the table was made.

    An entry is made only once the engine itself has named its version, so a recovered engine never serves older weights.
    """

    url: str
    hardware_class: str
    version: Version
    load: int = 0


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The engines there are; a higher `revision` replaces a lower one, whichever arrives first."""

    entries: tuple[EngineEntry, ...] = ()
    revision: int = 0

    @property
    def classes(self) -> tuple[str, ...]:
        """The hardware classes that have an engine, in alphabetical order."""
        return tuple(sorted({e.hardware_class for e in self.entries}))


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine chosen, and why: `fell_back` (none of the class asked for), `affine` (the trajectory was there last)."""

    entry: EngineEntry
    fell_back: bool
    affine: bool


def choose(table: EngineTable, hardware_class: str, affinity_key: str | None, in_flight: Mapping[str, int], fall_back: bool = True) -> Choice:
    """Class first, then affinity, then load; equal loads go to the smaller URL, so the choice repeats.

    `affinity_key` is the URL of the engine that served the trajectory's last turn and has its prefix cached, None at the
    first turn. `in_flight` counts the caller's own open requests by URL; they stand in for the table's `load` where
    they are more. Raises NoEngine, which names the class, if no engine is left (or only other classes, without `fall_back`).
    """
    entries = [e for e in table.entries if e.hardware_class == hardware_class]
    fell_back = not entries and fall_back
    if fell_back:
        entries = list(table.entries)
    if not entries:
        raise NoEngine(hardware_class, table.classes)
    for entry in entries:
        if entry.url == affinity_key:
            return Choice(entry, fell_back, affine=True)
    least = min(entries, key=lambda e: (max(e.load, in_flight.get(e.url, 0)), e.url))
    return Choice(least, fell_back, affine=False)


def pick(table: EngineTable, hardware_class: str, affinity_key: str | None, in_flight: Mapping[str, int]) -> EngineEntry:
    """The engine of `choose` alone, for callers that report a fallback by comparing `entry.hardware_class` with what they asked for."""
    return choose(table, hardware_class, affinity_key, in_flight).entry
