"""How an SGLang server is started for a generation worker; values only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollart.engines.response import STREAM_INTERVAL
from rollart.engines.settings import Swap
from rollart.engines.sglang.drafts import HeadKind, adaptive_steps, draft_flags
from rollart.engines.sglang.flags import Flag, flag_arguments
from rollart.engines.speculative.settings import WEIGHTED, SpeculationSettings
from rollart.types import KVMode

__all__ = ["SglangSettings"]

MARGIN = 8
"""SGLang refuses a prompt of its context length less 6, and ends responses 2 tokens before it: with so many more it takes all that is
within `max_length`."""


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """An SGLang server of the model in `model_url`, as `EngineSettings` has it for the embedded engine.

    `python` is the interpreter of the environment with SGLang, which need not be this one; None takes this one. `slots` requests run at a
    time. On a CPU the KV cache has room for just these; elsewhere `memory_fraction` of the device's memory holds weights and cache, None leaves
    that to SGLang. `tensor_parallel` devices share the model, from the one in `device` on. `attention_backend` None: torch_native on a CPU, else
    SGLang's choice. `flags`: more of its flags, which `wrong_flags` has nothing against. A draft of kind head is one of `head`.
    """

    model_url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    slots: int = 128
    max_length: int = 512
    chunk: int = 1024
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    kv: KVMode = "recomputed"
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    attention_backend: str | None = None
    flags: Mapping[str, Flag] = field(default_factory=dict)
    stream_interval: int = STREAM_INTERVAL
    start_seconds: float = 600.0
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    head: HeadKind = "eagle3"

    @property
    def by_tensors(self) -> int:
        """All of them where a draft has weights of its own, into which what is loaded from a folder would go as well."""
        return self.tensor_parallel if self.speculation.draft in WEIGHTED else 0

    @property
    def takes_adapters(self) -> bool:
        """An adapter of its own would have to be named by each request, which then keeps it to the end whatever is served."""
        return False

    def drafting_from(self, folder: Path, version: str) -> SglangSettings:
        """The same with the draft's weights, of that version, in the local `folder`."""
        return dataclasses.replace(self, speculation=dataclasses.replace(self.speculation, model=folder, version=version))

    @property
    def swap(self) -> Swap:
        """As `kv` says."""
        return "retracting" if self.kv == "recomputed" else "in_place"

    @property
    def environment(self) -> dict[str, str]:
        """One torch thread: SGLang's processes on a CPU slow each other down by two orders of magnitude with more. `/health` answers without
        generating, since it is asked every second; `/health_generate` generates. Connections stay open for longer than the client keeps them, or
        it would ask on one that is just being closed. Of the length that is beyond the model's nothing is used."""
        found = {
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "true",
            "SGLANG_TIMEOUT_KEEP_ALIVE": "300",
        }  # fmt: skip
        return {**found, "SGLANG_USE_CPU_ENGINE": "1"} if self._on_cpu else found

    def command(self, folder: Path, host: str) -> list[str]:
        """What follows `python`: the module that starts SGLang and dies with its owner, and SGLang's own arguments after `--`."""
        ours = ["-m", "rollart.engines.sglang", "--host", host]
        if self.python is not None:
            ours += ["--python", self.python]
        if (steps := adaptive_steps(self.speculation)) is not None:
            ours += ["--adaptive", json.dumps(steps)]
        flags = (self._own_flags(folder), draft_flags(self.speculation, self.head), self.flags)
        return [*ours, "--", *(argument for each in flags for argument in flag_arguments(each))]

    def _own_flags(self, folder: Path) -> dict[str, Flag]:
        kind, _, index = self.device.partition(":")
        flags: dict[str, Flag] = {
            "model-path": str(folder), "load-format": "dummy", "weight-version": "none", "skip-tokenizer-init": True, "dtype": self.dtype,
            "device": kind, "context-length": self.max_length + MARGIN, "max-running-requests": self.slots, "chunked-prefill-size": self.chunk,
            "tp-size": self.tensor_parallel, "stream-interval": self.stream_interval, "incremental-streaming-output": True,
            "enable-metrics": True, "grammar-backend": "none", "log-level": "warning",
        }  # fmt: skip
        if index and not self._on_cpu:
            flags["base-gpu-id"] = int(index)
        backend = self.attention_backend or ("torch_native" if self._on_cpu else None)
        if backend is not None:
            flags["attention-backend"] = backend
        if self._on_cpu:
            flags |= {"disable-overlap-schedule": True, "max-total-tokens": self.slots * (self.max_length + MARGIN)}
        elif self.memory_fraction is not None:
            flags["mem-fraction-static"] = self.memory_fraction
        return flags

    @property
    def _on_cpu(self) -> bool:
        return self.device.partition(":")[0] == "cpu"
