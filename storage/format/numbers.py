"""Lists of numbers (sizes, checksums) as text in a commit: little-endian uint32 in base64; owns that spelling alone."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint32]


def spelled(numbers: Sequence[int] | Numbers) -> str:
    """The list as text."""
    return base64.b64encode(np.array(numbers, dtype="<u4").tobytes()).decode()


def numbers_of(text: str) -> Numbers:
    """What `spelled` gave; ValueError for anything else."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<u4")
