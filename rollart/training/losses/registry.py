"""Names the policy losses; whoever calls one knows only its signature."""

from __future__ import annotations

from collections.abc import Callable

from rollart.training.losses.decoupled_ppo import decoupled_ppo
from rollart.training.losses.ppo_clip import ppo_clip
from rollart.training.losses.terms import LossInputs, LossTerms
from rollart.training.settings import LossName, LossSettings

__all__ = ["LOSSES", "PolicyLoss"]

PolicyLoss = Callable[[LossInputs, LossSettings], LossTerms]

LOSSES: dict[LossName, PolicyLoss] = {"decoupled_ppo": decoupled_ppo, "ppo_clip": ppo_clip}
