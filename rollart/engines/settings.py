"""How an engine process is started, and how it takes new weights; values only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rollart.engines.response import STREAM_INTERVAL
from rollart.engines.speculative.settings import SpeculationSettings
from rollart.types import KVMode

__all__ = ["EngineLaunch", "EngineSettings", "Selector", "Swap"]

Swap = Literal["between_steps", "retracting", "in_place"]
"""What becomes of the responses in flight when weights change. between_steps: the engine itself swaps between two decode steps and goes on
with them. retracting: the engine halts and queues them again, with what there is of them, and goes on under the new weights with all of their KV
computed anew. in_place: it halts, and goes on with their KV as it is."""

Selector = Literal["target", "draft"]
"""Whose weights new ones are: the policy's, or those of what drafts for it."""


class EngineLaunch(Protocol):
    """What a host has to know of its engine, whichever kind that is."""

    @property
    def model_url(self) -> str: ...

    @property
    def storage_options(self) -> Mapping[str, Any]: ...

    @property
    def start_seconds(self) -> float: ...

    @property
    def swap(self) -> Swap: ...

    @property
    def speculation(self) -> SpeculationSettings: ...

    @property
    def by_tensors(self) -> int:
        """How many ranks new weights are sent to as tensors; 0 if the engine loads them from a folder."""
        ...

    @property
    def takes_adapters(self) -> bool:
        """Whether it takes an adapter without its base once it has that; otherwise its host adds the adapter in."""
        ...

    def drafting_from(self, folder: Path, version: str) -> EngineLaunch:
        """The same with the draft's weights, of that version, in the local `folder`."""
        ...

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the process needs beside this one's."""
        ...

    def command(self, folder: Path, host: str) -> list[str]:
        """What follows `python` to start it, with the model in the local `folder`, so that it listens at `host`."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """An embedded engine of the model in `model_url`, a folder (local, or any fsspec URL with `storage_options`) with config.json.

    `slots` sequences of at most `max_length` tokens share the KV cache: those that run and those whose prefix waits for its
    next turn. `chunk` bounds the prompt tokens of one step, over all requests. `host` is where it listens, by default the
    worker's own address; `port` 0 takes a free one. `start_seconds` bounds the start. A draft's
    weights are read with the same `storage_options`.
    """

    model_url: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    slots: int = 128
    max_length: int = 512
    chunk: int = 1024
    threads: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    kv: KVMode = "recomputed"
    deterministic: bool = False
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    stream_interval: int = STREAM_INTERVAL
    host: str | None = None
    port: int = 0
    start_seconds: float = 180.0

    @property
    def by_tensors(self) -> int:
        """It loads a folder's weights into the policy or the draft, as it is told."""
        return 0

    @property
    def takes_adapters(self) -> bool:
        """It keeps the base, and adds each adapter into that."""
        return True

    @property
    def swap(self) -> Swap:
        """It recomputes or keeps the KV as `kv` says, by itself."""
        return "between_steps"

    def drafting_from(self, folder: Path, version: str) -> EngineSettings:
        """The same with the draft's weights, of that version, in the local `folder`."""
        return dataclasses.replace(self, speculation=dataclasses.replace(self.speculation, model=folder, version=version))

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"}

    def command(self, folder: Path, host: str) -> list[str]:
        """What follows `python`, with the model in the local `folder`."""
        values = {
            "model": folder, "host": self.host or host, "port": self.port, "slots": self.slots, "max-length": self.max_length,
            "chunk": self.chunk, "threads": self.threads, "dtype": self.dtype, "device": self.device, "kv": self.kv,
            "stream-interval": self.stream_interval,
        }  # fmt: skip
        options = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        options += self.speculation.arguments()
        return ["-m", "rollart.engines.embedded", *options, *(["--deterministic"] if self.deterministic else [])]
