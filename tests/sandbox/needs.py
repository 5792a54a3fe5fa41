"""Where there is no sandbox, what needs one is skipped, with what to install."""

from __future__ import annotations

import pytest

from rollart.sandbox.limits import SandboxMissing
from rollart.sandbox.machine import machine


def _lacks() -> str:
    try:
        machine()
    except SandboxMissing as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(_lacks()), reason=_lacks() or "there is a sandbox")
