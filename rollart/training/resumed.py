"""What a learner came back as; plain data that crosses processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from storage.version import Version


@dataclass(frozen=True, slots=True)
class Resumed:
    """`version`: the checkpoint that was loaded, None if there is none; `lineage`: the new one; `documents`: what was saved beside the state."""

    version: Version | None
    lineage: int
    documents: dict[str, Any] = field(default_factory=dict)
