"""Which environments there are by name: those that come with rollart, and those that installed packages bring as entry points.

Owns names, where they come from and what they need; imports no environment.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

GROUP = "rollart.environments"
"""Entry points of this group, `name = "package.module:Class"`, are environments by that name."""


class AmbiguousName(ValueError):
    """Two packages bring an environment of the same name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An environment's name, its import path, the package that brings it, and what of the `needs` (modules, of the extra `extra`) it uses.

    `alone`: a package beside the extra, to be installed without what it asks for.
    """

    name: str
    path: str
    origin: str = "rollart"
    extra: str = ""
    needs: tuple[str, ...] = ()
    alone: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """Modules that it needs and that aren't installed here."""
        return tuple(module for module in self.needs if importlib.util.find_spec(module) is None)

    @property
    def how_to_install(self) -> str:
        beside = f" && pip install --no-deps {self.alone}" if self.alone else ""
        return f"pip install 'rollart[{self.extra}]'{beside}"


SHIPPED: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("gymnasium", "rollart.environments.toy_text:ToyText"),
        Entry("frozen_lake", "rollart.environments.frozen_lake:FrozenLake"),
        Entry("guess_number", "rollart.environments.guess_number:GuessNumber"),
        Entry("openenv", "rollart.environments.open_env:OpenEnv"),
        Entry("questions", "rollart.environments.questions:Questions"),
        Entry("reasoning", "rollart.environments.reasoning:Reasoning"),
        Entry("shop", "rollart.environments.shop:Shop"),
        Entry("textarena", "rollart.environments.text_arena:TextArena", extra="textarena", needs=("textarena",)),
        Entry("tools", "rollart.environments.tools:Tools", extra="tools", needs=("bfcl_eval", "mpmath"), alone="bfcl-eval==2026.3.23"),
    )
}


def brought() -> dict[str, Entry]:
    """What installed packages bring, by name, without the names that rollart has itself: these stay its own.

    AmbiguousName if two packages bring one name with different paths.
    """
    found: dict[str, Entry] = {}
    for point in entry_points(group=GROUP):
        entry = Entry(point.name, point.value, _origin(point))
        other = found.setdefault(point.name, entry)
        if other.path != entry.path:
            raise AmbiguousName(f"environment {point.name!r} is brought by {other.origin} and by {entry.origin}; give the import path")
    return {name: entry for name, entry in found.items() if name not in SHIPPED}


def known() -> dict[str, Entry]:
    """Every name there is; AmbiguousName."""
    return {**SHIPPED, **brought()}


def find(name: str) -> Entry | None:
    """The entry of that name, or None; AmbiguousName. Looks among installed packages only for names that rollart doesn't have."""
    return SHIPPED.get(name) or brought().get(name)


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an installed package"
