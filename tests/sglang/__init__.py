"""A real SGLang server on a CPU, for tests: the environment that `make sglang` makes, and stand-ins for what has no form there."""

from __future__ import annotations

from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
"""The interpreter of the environment with SGLang."""

needs_sglang = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-sglang here: `make sglang` makes it and runs this")
