"""Makes what `SpeculationSettings` name; the only place that knows all drafts."""

from __future__ import annotations

from pathlib import Path

from rollart.control.speculation import DraftLengths
from rollart.drafts.folder import load_head
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.speculative.draft import Draft, DraftError
from rollart.engines.speculative.head_draft import HeadDraft
from rollart.engines.speculative.model_draft import ModelDraft
from rollart.engines.speculative.ngram_draft import NgramDraft
from rollart.engines.speculative.settings import SpeculationSettings
from rollart.engines.speculative.speculator import Speculator

__all__ = ["make_speculator"]


def make_speculator(settings: SpeculationSettings, policy: PolicyModel, slots: int, max_length: int, chunk: int) -> Speculator | None:
    """A speculator for a scheduler of `slots` slots over `policy`, None where nothing is drafted. A draft's weights are of the policy's number
    format and on its device; DraftError if a model has none or another vocabulary, or if a head is for another policy. A head may come later."""
    if settings.draft == "none":
        return None
    draft = _make_draft(settings, policy, slots, max_length, chunk)
    return Speculator(draft, settings.length, DraftLengths(settings.length) if settings.adaptive else None)


def _make_draft(settings: SpeculationSettings, policy: PolicyModel, slots: int, max_length: int, chunk: int) -> Draft:
    folder = None if settings.model is None else Path(settings.model)
    if settings.draft == "head":
        head = None if folder is None else load_head(folder, policy.dtype, policy.device)
        return HeadDraft(policy, slots, max_length, chunk, head, "none" if head is None else settings.version)
    if settings.draft == "ngram":
        return NgramDraft(settings.memory)
    if folder is None:
        raise DraftError("a draft of kind model needs the folder of its model")
    model = PolicyModel(folder, policy.dtype, policy.device)
    if not model.loaded:
        raise DraftError(f"{folder} holds no model.safetensors; a draft needs weights from the start")
    return ModelDraft(model, policy.vocabulary, slots, max_length, chunk, settings.version)
