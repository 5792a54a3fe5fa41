"""Which hardware class serves a stage or a task, and which stands in where it can't; decides from declarations, measures nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["train", "logprobs", "generate", "environment", "reward"]

STAGES: tuple[Stage, ...] = ("train", "logprobs", "generate", "environment", "reward")

MOVABLE: tuple[Stage, ...] = ("generate", "environment", "reward")
"""Stages whose work may go to another class at any time. The others hold state: ranks are formed once, and a reference is loaded once."""


@dataclass(frozen=True, slots=True)
class AffinityMap:
    """`stages`: stage -> class for every task; `tasks`: (task, stage) -> class where a task wants another one.

    `fallbacks`: class -> the class that stands in for it where it is full or gone; no chain of them comes back to where it began.
    `candidates`: further classes with engines, to which a task may be moved.
    """

    stages: Mapping[Stage, str]
    tasks: Mapping[tuple[str, Stage], str] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    candidates: frozenset[str] = frozenset()

    def hardware_class(self, stage: Stage, task: str | None = None) -> str:
        """The class for `stage` of `task`; KeyError if the stage is mapped nowhere."""
        if task is not None and (task, stage) in self.tasks:
            return self.tasks[task, stage]
        return self.stages[stage]

    def stand_ins(self, name: str) -> tuple[str, ...]:
        """The classes that stand in for class `name`, first choice first."""
        found: list[str] = []
        while (after := self.fallbacks.get(name)) is not None:
            found.append(after)
            name = after
        return tuple(found)

    def serving(self, stage: Stage, tasks: Iterable[str]) -> set[str]:
        """Every class that serves `stage` for one of `tasks`, or may have to."""
        named = {self.hardware_class(stage, task) for task in tasks} | (self.candidates if stage == "generate" else set())
        return named | {s for name in named for s in self.stand_ins(name) if stage in MOVABLE}

    def used(self) -> set[str]:
        """Every class that some stage or task needs, or may have to fall back to."""
        named = set(self.stages.values()) | set(self.tasks.values()) | self.candidates
        return named | {s for name in named for s in self.stand_ins(name)}

    def purposes(self, name: str) -> list[str]:
        """What class `name` is for, in words: stages, `task.stage`, the classes that it stands in for, `placement`."""
        stages: list[str] = [s for s, c in self.stages.items() if c == name and not (s == "logprobs" and c == self.stages.get("train"))]
        tasks = [f"{t}.{s}" for (t, s), c in self.tasks.items() if c == name]
        placed = ["placement"] if name in self.candidates else []
        return stages or tasks or placed or [f"the fallback of {c}" for c, other in self.fallbacks.items() if other == name]


def wrong_fallbacks(fallbacks: Mapping[str, str], classes: Collection[str], serves: Mapping[str, Collection[Stage]]) -> dict[str, str]:
    """Class -> what is wrong with its fallback, in words. `serves`: class -> the stages that the configuration maps to it.

    A class that serves nothing by itself may stand in for any; one that serves something must serve all that it stands in for.
    """
    found: dict[str, str] = {}
    for name, other in fallbacks.items():
        chain, reached = [name, other], other
        while (after := fallbacks.get(reached)) is not None and reached not in chain[:-1]:
            chain.append(after)
            reached = after
        lacking = [s for s in serves.get(name, ()) if s not in serves.get(other, ())]
        held = [s for s in serves.get(name, ()) if s not in MOVABLE]
        if other not in classes:
            found[name] = f"no hardware class {other!r}; declare hardware.{other} or use one of {sorted(classes)}"
        elif reached in chain[:-1]:
            found[name] = f"{' -> '.join(chain)} comes back to {reached}; leave one of these out"
        elif held:
            found[name] = f"{name} serves {', '.join(held)}, whose state stays where it is; leave it out"
        elif lacking and serves.get(other):
            found[name] = f"{other} doesn't serve {', '.join(lacking)}, which {name} does; name a class that does, or one without a stage of its own"
    return found
