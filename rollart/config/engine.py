"""What generates, and what computes log-probabilities apart from the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollart.config.section import Section
from rollart.engines.sglang.drafts import HeadKind
from rollart.engines.sglang.flags import Flag
from rollart.engines.speculative.settings import DraftKind
from rollart.training.settings import DEVICE


class SglangSection(Section):
    """The SGLang server that each generation worker starts; of engine.kind sglang alone."""

    python: str | None = Field(
        None,
        min_length=1,
        description="interpreter, on the generation workers, of the environment with SGLang (0.5.21 or newer); default: the worker's own",
    )
    tensor_parallel: int = Field(1, ge=1, description="devices that share the model, from the one in engine.device on")
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the device's memory for weights and KV cache; default: SGLang's choice",
    )
    attention_backend: str | None = Field(
        None, pattern=r"^[a-z0-9_]+$", description="SGLang's name of it; default: torch_native on a CPU, else SGLang's choice"
    )
    head: HeadKind = Field("eagle3", description="of engine.speculation.draft head: which of SGLang's algorithms the head is a checkpoint of")
    flags: dict[str, Flag] = Field(
        default_factory=dict,
        description="more flags of SGLang's server, by long name without dashes (true: a flag without a value); what the system sets itself, and "
        "what would not sample from the policy's own distribution, is refused",
    )
    start_timeout: float = Field(600.0, gt=0, description="seconds that a server may take until it is healthy")


class SpeculationSection(Section):
    """Tokens that are drafted and verified several in a pass: what is sampled has the same distribution, in fewer passes."""

    draft: DraftKind = Field(
        "none",
        description="who drafts: ngram looks up what came after the same tokens, also in earlier trajectories of the task; model: a smaller one; "
        "head: a layer on the policy's own hidden states (see engines.md)",
    )
    length: int = Field(4, ge=1, le=15, description="tokens drafted at most, of each request in each pass")
    adaptive: bool = Field(True, description="draft fewer, or none, where that was measured to give more tokens a second")
    model: str | None = Field(
        None,
        min_length=1,
        description="of draft model or head: the folder of its weights to start with, or its URL, or `URL@VERSION`; a model has the policy's "
        "tokenizer",
    )
    versions: str | None = Field(
        None, min_length=1, description="of draft model or head: URL of the store of its versions, of which the newest is served from the start"
    )
    follow: bool = Field(False, description="serve newer versions of the draft as they appear in `versions`; else the one at the start stays")
    memory: int = Field(65536, ge=0, description="of draft ngram: tokens of ended requests that are remembered, half a kilobyte each")


class EngineSettings(Section):
    """The generation engine that each generation worker owns."""

    kind: Literal["embedded", "sglang"] = Field(
        "embedded", description="embedded: torch in a process of the worker's, for small models; sglang: a server that the worker starts"
    )
    slots: int = Field(128, ge=1, description="sequences in the KV cache: those that decode, and those whose prefix waits for its next turn")
    max_length: int = Field(512, ge=32, description="tokens a request may reach, prompt included")
    chunk: int = Field(1024, ge=1, description="prompt tokens of one pass, over all requests")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of the weights")
    device: str = Field("cpu", pattern=DEVICE, description="torch device")
    kv: Literal["recomputed", "kept"] = Field("recomputed", description="what happens to the KV cache of responses in flight at a weight swap")
    speculation: SpeculationSection = Field(default_factory=lambda: SpeculationSection())
    sglang: SglangSection = Field(default_factory=lambda: SglangSection())


class LogprobSettings(Section):
    """Reference and proximal log-probabilities on workers of their own: what `stages.logprobs` names another class than `stages.train` for."""

    device: str | None = Field(None, pattern=DEVICE, description="torch device of those workers; default: training.model.device")
    token_budget: int | None = Field(
        None, ge=1, description="tokens of one forward pass there, padding included; default: training.batch.token_budget"
    )
