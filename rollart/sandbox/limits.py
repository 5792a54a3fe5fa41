"""What a sandbox allows, how a command in it ended, and what can go wrong with the machine; runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 2**20

Level = Literal["cgroups", "rlimits"]
"""How limits are kept, strongest first; namespaces and the system call filter are the same at both. `cgroups`: the kernel counts memory, processes
and processor time of the whole sandbox. `rlimits`: it counts by process, and memory and processor time of the whole are watched from outside, which
acts a moment late."""

LEVELS: tuple[Level, ...] = ("cgroups", "rlimits")

Ended = Literal["exited", "signalled", "wall", "cpu", "memory", "output", "processes"]
"""`exited`: by itself, with `status`. `signalled`: by a signal that no limit sent. `processes`: it failed, and had been refused a process. The others
name the limit that ended it."""


class SandboxError(RuntimeError):
    """The machine's doing, never that of what runs in the sandbox."""


class SandboxMissing(SandboxError):
    """This machine has no sandbox as strong as is asked for; the message says what to install or to allow."""


class SandboxFailed(SandboxError):
    """A sandbox broke, or was used after its end."""


class SandboxFileError(SandboxError):
    """A file of the sandbox is not there, is no plain file of its writable folders, or is larger than was asked for."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Of the whole sandbox: `memory` (bytes, beside the files below), `disk` (bytes of each of /workspace and /tmp), `processes`, `processors`,
    `open_files` a process and `file_size` (bytes). Of each command in it: `wall_s`, `cpu_s` (seconds, of all its processes together) and
    `output` (bytes of each of its two streams)."""

    memory: int = 512 * MIB
    disk: int = 64 * MIB
    file_size: int = 64 * MIB
    processes: int = 32
    processors: float = 1.0
    open_files: int = 256
    wall_s: float = 10.0
    cpu_s: float = 10.0
    output: int = MIB

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"SandboxLimits.{name} is {getattr(self, name)}; it has to be over 0")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a command ended. `status`: its exit status, or minus the signal that ended it. `stdout`, `stderr`: at most `limits.output` bytes of each.
    `seconds` on the clock, `cpu_s` of all processes that it had; `peak_memory` in bytes: of the whole sandbox so far where cgroups count it, else
    that of its largest process."""

    status: int
    ended: Ended
    stdout: bytes
    stderr: bytes
    seconds: float
    cpu_s: float
    peak_memory: int

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.ended == "exited" and self.status == 0
