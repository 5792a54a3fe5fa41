"""Recorded shapes of rollout (`make.py` writes them): how long resets, turns, generation and training take, in seconds. Data only."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def load(name: str) -> dict[str, Any]:
    """The trace `name`, as `make.py` describes it."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    return found
