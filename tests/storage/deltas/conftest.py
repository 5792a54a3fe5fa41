"""Stores whose every fourth version is whole, the others changes of the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage.weights import WeightStore


@pytest.fixture
def weights(place: tuple[str, dict[str, Any]]) -> WeightStore:
    return WeightStore(*place, full_every=4)


@pytest.fixture
def local(tmp_path: Path) -> WeightStore:
    return WeightStore(str(tmp_path / "store"), full_every=4)
