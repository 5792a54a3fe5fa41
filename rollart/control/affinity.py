"""Which hardware class serves a stage or a task; decides from declarations, measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["train", "logprobs", "generate", "environment", "reward"]

STAGES: tuple[Stage, ...] = ("train", "logprobs", "generate", "environment", "reward")


@dataclass(frozen=True, slots=True)
class AffinityMap:
    """`stages`: stage -> class for every task; `tasks`: (task, stage) -> class where a task wants another one."""

    stages: Mapping[Stage, str]
    tasks: Mapping[tuple[str, Stage], str] = field(default_factory=dict)

    def hardware_class(self, stage: Stage, task: str | None = None) -> str:
        """The class for `stage` of `task`; KeyError if the stage is mapped nowhere."""
        if task is not None and (task, stage) in self.tasks:
            return self.tasks[task, stage]
        return self.stages[stage]

    def used(self) -> set[str]:
        """Every class that some stage or task needs."""
        return set(self.stages.values()) | set(self.tasks.values())
