"""What a run looks like at one moment, as plain data: the only thing that progress displays read. Gathers nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Phase", "RunStatus"]

Phase = Literal["starting", "warming up", "evaluating", "training", "stopping", "done"]
"""What the run as a whole is about; it changes a few times a run, not within a step."""


@dataclass(slots=True)
class RunStatus:
    """A snapshot of a run.

    `step` of `steps` training steps are done and `version` (`LINEAGE-STEP`) is the newest published one. `in_flight`
    trajectories have started and not ended, `finished` ones are durable. `fates` counts ended trajectories by what became of
    them (`trained`, or why they were dropped), `staleness` the trained ones by staleness in versions. `reward` is each task's
    moving mean over recent training groups. `awaited` says in words what the run waits for, if it waits; `dashboard` is the address of the
    Dask dashboard. `seconds` counts from the run's start.
    """

    step: int = 0
    steps: int = 0
    version: str = "0-0"
    phase: Phase = "starting"
    in_flight: int = 0
    finished: int = 0
    fates: dict[str, int] = field(default_factory=dict)
    reward: dict[str, float] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    awaited: str = ""
    dashboard: str = ""
    seconds: float = 0.0

    @property
    def dropped(self) -> int:
        """How many trajectories ended without being trained on."""
        return sum(count for fate, count in self.fates.items() if fate != "trained")
