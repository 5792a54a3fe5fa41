"""The environment's own rewards as the score; owns the sum and nothing else."""

from __future__ import annotations

from rollart.rewards.protocol import Verdict
from rollart.types import Trajectory


def environment(trajectory: Trajectory) -> Verdict:
    """The sum of the rewards over all turns."""
    return Verdict(trajectory.environment_reward)
