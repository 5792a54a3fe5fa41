"""Names the policy losses; whoever calls one knows only its signature."""

from __future__ import annotations

from rollart.training.losses.cispo import cispo
from rollart.training.losses.decoupled_ppo import decoupled_ppo
from rollart.training.losses.gspo import gspo
from rollart.training.losses.mask import PolicyLoss, masked
from rollart.training.losses.ppo_clip import ppo_clip
from rollart.training.losses.terms import LossInputs, LossTerms
from rollart.training.losses.tis import tis
from rollart.training.settings import LossName, LossSettings

__all__ = ["LOSSES", "PolicyLoss", "policy_loss"]

LOSSES: dict[LossName, PolicyLoss] = {"decoupled_ppo": decoupled_ppo, "ppo_clip": ppo_clip, "cispo": cispo, "gspo": gspo, "tis": tis}


def policy_loss(inputs: LossInputs, settings: LossSettings) -> LossTerms:
    """The loss that the settings name, without what their mask leaves out."""
    return masked(LOSSES[settings.name], inputs, settings)
