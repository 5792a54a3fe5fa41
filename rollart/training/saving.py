"""A learner's state as arrays and a document, out and in; owns their names, no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollart.training.advantages.reinforce import RunningBaselines
from rollart.training.errors import StateError
from rollart.training.state import check_fits, copies, fill, under

if TYPE_CHECKING:
    from rollart.training.learner import Learner

__all__ = ["put_back", "taken"]


def taken(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As `Learner.state` has it."""
    arrays = copies(learner.policy.model, "weights/")
    arrays |= {f"optimiser/{name}": value for name, value in learner.optimiser.arrays().items()}
    if learner.reference is not None:
        arrays |= copies(learner.reference.model, "reference/")
    if learner.value_head is not None:
        arrays |= copies(learner.value_head, "value_head/")
    document = {"step": learner.step, "optimiser": learner.optimiser.counts(), "baselines": dict(learner.baselines.means)}
    if learner.draft is not None:
        drafts, document["draft"] = learner.draft.state()
        arrays |= {f"draft/{name}": value for name, value in drafts.items()}
    arrays["rng/torch"] = torch.get_rng_state()
    return arrays, document


def put_back(learner: Learner, arrays: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """As `Learner.load_state` has it. A draft head that was not saved is that of a run which began without one: it stays what it is."""
    if "rng/torch" not in arrays or not {"step", "optimiser", "baselines"} <= set(document):
        raise StateError("the learner's state lacks rng/torch, step, optimiser or baselines; it is not a checkpoint of a learner")
    held: dict[str, nn.Module | None] = {
        "weights/": learner.policy.model,
        "reference/": None if learner.reference is None else learner.reference.model,
        "value_head/": learner.value_head,
    }
    there = {prefix: module for prefix, module in held.items() if module is not None}
    drafts = under("draft/", arrays)
    for prefix, module in there.items():
        check_fits(module, under(prefix, arrays))
    if learner.draft is not None and drafts:
        learner.draft.check(drafts)
    for prefix, module in there.items():
        fill(module, under(prefix, arrays))
    learner.optimiser.load(under("optimiser/", arrays), document["optimiser"])
    if learner.draft is not None and drafts:
        learner.draft.load(drafts, document["draft"])
    learner.baselines = RunningBaselines(document["baselines"])
    learner.step = int(document["step"])
    torch.set_rng_state(arrays["rng/torch"])
