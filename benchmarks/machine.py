"""Names the machine that a measurement was taken on; measures nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "transformers", "distributed", "zarr", "numpy")


def describe() -> dict[str, Any]:
    """Processor, usable cores, memory in GB, one-minute load, system, Python and the packages that decide speed."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_1min": round(psutil.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def title(machine: dict[str, Any]) -> str:
    """One line for a table's caption or a figure's foot."""
    parts = [machine["processor"], f"{machine['cores']} cores", f"{machine['memory_gb']} GB", f"load {machine['load_1min']}"]
    return ", ".join([*parts, f"Python {machine['python']}"])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
