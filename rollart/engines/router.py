"""Chooses the engine for a request from a table that is pushed to the caller; pure, so that the planner can run it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollart.engines.errors import NoEngine
from storage.version import Version

__all__ = ["Choice", "EngineEntry", "EngineTable", "Routes", "StandIns", "choose", "pick"]


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
    """The engines there are; a higher `revision` replaces a lower one, whichever arrives first. `coordinator`: whose table it is, by number."""

    entries: tuple[EngineEntry, ...] = ()
    revision: int = 0
    coordinator: int = 0

    @property
    def classes(self) -> tuple[str, ...]:
        """The hardware classes that have an engine, in alphabetical order."""
        return tuple(sorted({e.hardware_class for e in self.entries}))

    def of_class(self, name: str) -> tuple[EngineEntry, ...]:
        """The engines of class `name`."""
        return tuple(e for e in self.entries if e.hardware_class == name)


@dataclass(frozen=True, slots=True)
class Routes:
    """Where requests should go; a higher `revision` replaces a lower one. `wanted`: task -> hardware class.

    `probes`: task -> a class that some of its trajectories try, so that it is measured there. `sharers`: workers among which the engines'
    room is shared out, since each knows its own requests alone.
    """

    wanted: Mapping[str, str]
    probes: Mapping[str, str] = field(default_factory=dict)
    sharers: int = 1
    revision: int = 0


@dataclass(frozen=True, slots=True)
class StandIns:
    """What serves where a class can't: `order` has the classes in its place, first choice first. `room`: class -> requests in flight at one
    of its engines, over which that engine is full; a class without an entry is never full."""

    order: tuple[str, ...] = ()
    room: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine chosen, and why: `fell_back` (it isn't of the class asked for), `affine` (the trajectory was there last)."""

    entry: EngineEntry
    fell_back: bool
    affine: bool


NOBODY = StandIns()


def choose(
    table: EngineTable, hardware_class: str, affinity_key: str | None, in_flight: Mapping[str, int], fall_back: bool = True,
    stand_ins: StandIns = NOBODY,
) -> Choice:  # fmt: skip
    """Class first, then affinity, then load; equal loads go to the smaller URL, so the choice repeats.

    `affinity_key` is the URL of the engine that served the trajectory's last turn and has its prefix cached, None at the
    first turn. `in_flight` counts the caller's own open requests by URL; they stand in for the table's `load` where
    they are more. A class whose engines are all full takes only what has its prefix there; what it doesn't take goes to the first of
    `stand_ins` with room, and if there is none it queues here. Where the class is gone, and all its stand-ins with it, any engine will do.
    Raises NoEngine, which names the class, if no engine is left (or only other classes, without `fall_back`).
    """
    names = (hardware_class, *(stand_ins.order if fall_back else ()))
    by_class = {name: entries for name in names if (entries := table.of_class(name))}
    for name, entries in by_class.items():
        for entry in entries:
            if entry.url == affinity_key:
                return Choice(entry, name != hardware_class, affine=True)
        room = stand_ins.room.get(name)
        if room is None or any(in_flight.get(e.url, 0) <= room for e in entries):
            return _least(entries, in_flight, hardware_class)
    left = next(iter(by_class.values()), table.entries if fall_back else ())
    if not left:
        raise NoEngine(hardware_class, table.classes)
    for entry in left:
        if entry.url == affinity_key:
            return Choice(entry, entry.hardware_class != hardware_class, affine=True)
    return _least(left, in_flight, hardware_class)


def _least(entries: Sequence[EngineEntry], in_flight: Mapping[str, int], hardware_class: str) -> Choice:
    least = min(entries, key=lambda e: (max(e.load, in_flight.get(e.url, 0)), e.url))
    return Choice(least, least.hardware_class != hardware_class, affine=False)


def pick(
    table: EngineTable, hardware_class: str, affinity_key: str | None, in_flight: Mapping[str, int], stand_ins: StandIns = NOBODY
) -> EngineEntry:
    """The engine of `choose` alone, for callers that report a fallback by comparing `entry.hardware_class` with what they asked for."""
    return choose(table, hardware_class, affinity_key, in_flight, stand_ins=stand_ins).entry
