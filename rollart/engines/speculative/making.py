"""Makes what `SpeculationSettings` name; the only place that knows all drafts."""

from __future__ import annotations

from pathlib import Path

from rollart.control.speculation import DraftLengths
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.speculative.draft import Draft, DraftError
from rollart.engines.speculative.model_draft import ModelDraft
from rollart.engines.speculative.ngram_draft import NgramDraft
from rollart.engines.speculative.settings import SpeculationSettings
from rollart.engines.speculative.speculator import Speculator

__all__ = ["make_speculator"]


def make_speculator(settings: SpeculationSettings, policy: PolicyModel, slots: int, max_length: int, chunk: int) -> Speculator | None:
    """A speculator for a scheduler of `slots` slots over `policy`, None where nothing is drafted. A draft model is of the policy's number
    format and on its device; DraftError if it has no weights or another vocabulary."""
    if settings.draft == "none":
        return None
    draft: Draft
    if settings.model is None:
        draft = NgramDraft(settings.memory)
    else:
        model = PolicyModel(Path(settings.model), policy.dtype, policy.device)
        if not model.loaded:
            raise DraftError(f"{settings.model} holds no model.safetensors; a draft needs weights from the start")
        draft = ModelDraft(model, policy.vocabulary, slots, max_length, chunk, "default")
    return Speculator(draft, settings.length, DraftLengths(settings.length) if settings.adaptive else None)
