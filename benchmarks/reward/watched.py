"""Runs a command and says how much memory it and all processes below it held at their peak; knows nothing of what it runs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import psutil

from rollart.telemetry import memory_in_use

SAMPLE_S = 0.5
"""Between two looks, each of which walks the pages of every process; shorter than the backward pass of a model worth watching."""


def watched(arguments: Sequence[str]) -> int:
    """Runs the command to its end; bytes at the peak, shared pages counted once. CalledProcessError if it fails."""
    peak = 0
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as command:
        while True:
            try:
                peak = max(peak, memory_in_use(psutil.Process(command.pid)))
                command.wait(SAMPLE_S)
            except subprocess.TimeoutExpired:
                continue
            except psutil.NoSuchProcess:
                command.wait()
            if command.returncode:
                raise subprocess.CalledProcessError(command.returncode, list(arguments))
            return peak
