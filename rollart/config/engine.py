"""What generates, and what computes log-probabilities apart from the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollart.config.section import Section
from rollart.training.settings import DEVICE


class EngineSettings(Section):
    """The generation engine that each generation worker owns."""

    kind: Literal["embedded"] = Field("embedded", description="embedded: torch in a process of the worker's, for small models")
    slots: int = Field(128, ge=1, description="sequences in the KV cache: those that decode, and those whose prefix waits for its next turn")
    max_length: int = Field(512, ge=32, description="tokens a request may reach, prompt included")
    chunk: int = Field(1024, ge=1, description="prompt tokens of one pass, over all requests")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of the weights")
    device: str = Field("cpu", pattern=DEVICE, description="torch device")
    kv: Literal["recomputed", "kept"] = Field("recomputed", description="what happens to the KV cache of responses in flight at a weight swap")


class LogprobSettings(Section):
    """Reference and proximal log-probabilities on workers of their own: what `stages.logprobs` names another class than `stages.train` for."""

    device: str | None = Field(None, pattern=DEVICE, description="torch device of those workers; default: training.model.device")
    token_budget: int | None = Field(
        None, ge=1, description="tokens of one forward pass there, padding included; default: training.batch.token_budget"
    )
