"""The loop of training steps, and what is kept of its versions."""

from __future__ import annotations

from pydantic import Field

from rollart.config.section import Section
from rollart.control.quotas import ShortRule


class TrainSettings(Section):
    """The reinforcement-learning loop."""

    steps: int = Field(100, ge=1, description="training steps in all; version n is the weights after n of them")
    groups: int = Field(24, ge=1, description="groups a batch, shared among the tasks by weight")
    alpha: int = Field(1, ge=0, le=64, description="staleness bound, in versions; 0 is synchronous")
    short: ShortRule = Field(
        "wait",
        description="while a task's groups are not there: wait for them, or fill their places with other tasks' groups, whose shares grow by it",
    )
    checkpoint_every: int = Field(20, ge=1, description="steps between checkpoints")
    max_skipped: int = Field(
        10,
        ge=1,
        description="steps in a row without anything to train on, or batches' worth of a task filtered out in a row, after which the run fails",
    )


class WeightSettings(Section):
    """How the run's versions and checkpoints are stored, and how long they stay; tagged and leased ones always do."""

    full_every: int = Field(
        1, ge=1, le=256, description="a version is whole at least every so many, and between stored as what changed; 1: all are whole"
    )
    keep_last: int = Field(8, ge=0, description="versions that stay, the newest ones and those in the staleness window; 0: all")
    keep_every: int = Field(0, ge=0, description="versions that stay besides: those whose step is a multiple of this; 0: none")
    keep_checkpoints: int = Field(3, ge=0, description="checkpoints that stay, with the versions at their steps; 0: all")
    grace: float = Field(600.0, ge=0, description="seconds that data stays after its version went, for readers that are at it")
