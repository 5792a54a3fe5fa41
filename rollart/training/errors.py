"""The errors that training raises; each message names what is wrong and what to do."""

from __future__ import annotations

__all__ = [
    "BatchError", "GroupBroken", "LogprobsError", "LogprobsLost", "LogprobsMismatch", "NonFiniteError", "StateError", "TrainerLost",
    "TrainingError", "TransformError",
]  # fmt: skip


class TrainingError(RuntimeError):
    """Base of what goes wrong in the trainer."""


class BatchError(TrainingError):
    """Trajectories, scores and advantages do not fit together."""


class TransformError(BatchError):
    """A segment was sampled in a way whose log-probabilities the trainer cannot reproduce."""


class LogprobsMismatch(BatchError):
    """Log-probabilities that other workers computed are not those of the tokens that are trained on."""


class LogprobsError(TrainingError):
    """A worker can't say the log-probabilities that a training step needs."""


class LogprobsLost(LogprobsError):
    """No worker is left that could compute the log-probabilities that a training step waits for."""


class NonFiniteError(TrainingError):
    """Too many optimiser steps in a row had a loss or a gradient that is not finite."""


class StateError(TrainingError):
    """Weights or state do not belong to this learner, or to the step that was asked for."""


class GroupBroken(TrainingError):
    """The ranks that train together aren't all there, or one of them doesn't answer; a new generation of the group can be formed."""


class TrainerLost(TrainingError):
    """The worker that held the learner is gone, and with it what was learned since the last checkpoint."""

    def __init__(self, address: str, task: str) -> None:
        self.address = address
        super().__init__(
            f"the training worker at {address} is gone, during {task}: what it held since the last checkpoint is lost; go on from there with --resume"
        )
