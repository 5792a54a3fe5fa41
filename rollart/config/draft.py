"""How the flow draft trains a head from what a run has stored."""

from __future__ import annotations

from pydantic import Field

from rollart.config.section import Section


class DraftTrainingSettings(Section):
    """A draft head trained from a run's stored trajectories, by `rollart draft RUN`; the head itself is in training.draft."""

    policy: str = Field(
        "newest",
        min_length=1,
        description="policy that the head is for: a version of the run's weights (`0-42`, a tag, newest), or the folder or URL of a model "
        "with the run's tokenizer",
    )
    steps: int = Field(300, ge=0, description="optimiser steps; 0 measures and publishes the head that there is")
    batch: int = Field(32, ge=1, description="trajectories a step")
    trajectories: int = Field(4096, ge=2, description="trajectories read at most, from the newest files on; scripted ones never are")
    held_out: float = Field(0.1, gt=0, le=0.5, description="share of each task's episodes that only measures acceptance")
    store: str | None = Field(None, min_length=1, description="URL of the store in which the head becomes a version; default: `heads` in the run")
    folder: str | None = Field(None, min_length=1, description="local folder that the head is written to besides, which has to be new or empty")
