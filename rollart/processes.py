"""Which process this is, and whether one that said so is still there; asks the system, and decides nothing about what follows."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_SAME_START_S = 5.0
"""How far two readings of one process's start may lie apart: they are told by way of the clock on the wall, which is set now and then."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process: `pid` on `host`, there since `started` (unix seconds). `place` names the kernel and the process ids' namespace."""

    host: str
    place: str
    pid: int
    started: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """The process that asks."""
    return Process(socket.gethostname(), _place(), os.getpid(), psutil.Process().create_time())


def is_gone(process: Process) -> bool:
    """Whether `process` has ended for sure, which only its own host can tell: elsewhere this is never true."""
    if (process.host, process.place) != (socket.gethostname(), _place()):
        return False
    try:
        found = psutil.Process(process.pid)
        return found.status() == psutil.STATUS_ZOMBIE or abs(found.create_time() - process.started) > _SAME_START_S
    except psutil.NoSuchProcess:
        return True


def _place() -> str:
    """What tells this kernel's start and namespace of process ids from others: containers may share a host's name, or have one of their own."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: there the name has to do
        return ""
