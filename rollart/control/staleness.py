"""The staleness window; decides whether work may start, go on or be trained on, from versions alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessWindow:
    """Staleness is the version a step starts from minus the version of a trajectory's first token; it never exceeds `alpha`.

    All versions here are steps of one lineage. alpha = 0 is synchronous training.
    """

    alpha: int

    def __post_init__(self) -> None:
        if self.alpha < 0:
            raise ValueError(f"alpha is {self.alpha}; the window counts versions from 0")

    def admissible(self, *, next_step: int, served: int, quota: int, ahead: int) -> int:
        """How many groups of a task may start now without outliving the window.

        `next_step`: the version that the next batch to be formed starts from; `served`: the oldest version that an engine
        still samples from; `quota`: the task's groups a batch; `ahead`: its groups admitted and not yet in a batch. A group that
        starts now is trained on, at the latest, in the batch that takes the (ahead + 1)th, which starts from
        `next_step + ahead // quota`.
        """
        batches = served + self.alpha - next_step + 1
        return max(0, batches * quota - ahead)

    def expired(self, first_version: int, step: int) -> bool:
        """Whether a trajectory that began at `first_version` is too old for the step that starts from version `step`."""
        return step - first_version > self.alpha

    def last_step(self, first_version: int) -> int:
        """The last step that may train on a trajectory that began at `first_version`, as the version that it starts from."""
        return first_version + self.alpha
