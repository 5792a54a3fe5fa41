"""Decides which versions stay and why; pure: versions, claims and ages come in, nothing is read or removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from storage.keeping.lineages import surviving
from storage.version import Version


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions stay, besides those with a tag or a lease and all that their data needs.

    `keep_last`: so many of the last ones, branch points before them included; at least 1. `keep_every`: those whose step is a
    multiple of it, None for none. `window`: those at most so many steps older than the newest, as a staleness bound allows them
    to be in use; None for none. `keep`: these too. Of an abandoned tail only what `keep`, a tag or a lease names stays.
    """

    keep_last: int = 1
    keep_every: int | None = None
    window: int | None = None
    keep: frozenset[Version] = frozenset()

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}: the newest version always stays, so keep 1 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every is {self.keep_every}: write every how many steps a version stays, or None")
        if self.window is not None and self.window < 0:
            raise ValueError(f"window is {self.window}: write how many steps older than the newest a version may be, or None")


@dataclass(frozen=True, slots=True)
class Claims:
    """What others hold: the versions that tags are on, by tag; holders of unexpired leases, by version; what each recorded lineage
    branched off."""

    tags: Mapping[str, Version]
    leases: Mapping[Version, tuple[str, ...]]
    parents: Mapping[int, Version | None]


def kept(
    retention: Retention, versions: Iterable[Version], claims: Claims, base: Callable[[Version], Version | None]
) -> dict[Version, tuple[str, ...]]:
    """Which versions stay -> why, ascending.

    `versions` are those that exist; `base` gives the version whose data one's deltas are of. A version that is named by a tag, a
    lease, a living lineage as its branch point, or a kept one as its base is in the result even if it isn't in `versions`: it is
    to be there.
    """
    existing = set(versions)
    why: dict[Version, list[str]] = {}

    def keep(version: Version, reason: str) -> None:
        reasons = why.setdefault(version, [])
        if reason not in reasons:
            reasons.append(reason)

    for lineage in _living(existing, claims.parents):
        path = surviving(existing, claims.parents, lineage)
        for version in path[-retention.keep_last :]:
            keep(version, "newest" if version == path[-1] else f"one of the last {retention.keep_last}")
        for version in path:
            if retention.keep_every is not None and version.step % retention.keep_every == 0:
                keep(version, f"every {retention.keep_every} steps")
            if retention.window is not None and path[-1].step - version.step <= retention.window:
                keep(version, f"within {retention.window} steps of the newest")
        parent = claims.parents.get(lineage)
        if parent is not None and not any(version.lineage == lineage for version in existing):
            keep(parent, f"lineage {lineage} begins there")
    for version in existing & retention.keep:
        keep(version, "asked for")
    for name, version in claims.tags.items():
        keep(version, f"tag {name}")
    for version, holders in claims.leases.items():
        for holder in holders:
            keep(version, f"leased by {holder}" if holder else "leased")
    for version in list(why):
        chain, needed = {version}, base(version)
        while needed is not None and needed not in chain:
            chain.add(needed)
            keep(needed, f"{version} is stored as changes of it")
            needed = base(needed)
    return {version: tuple(why[version]) for version in sorted(why)}


def _living(existing: set[Version], parents: Mapping[int, Version | None]) -> list[int]:
    """The newest lineage that has versions, and all that were opened after it and have none yet."""
    last = max((version.lineage for version in existing), default=-1)
    return sorted({number for number in parents if number > last} | ({last} if existing else set()))
