"""Groups of processes that the kernel counts: made, read and removed, in version 1 and 2; knows nothing of what runs in them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from rollart.sandbox.limits import SandboxLimits, SandboxMissing

_PREFIX = "rollart-sandbox"
_PERIOD_US = 100_000
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Roots:
    """The folders in which this process may make groups. `version` 1: one for each controller; 2: one for all of them."""

    version: int
    memory: Path
    pids: Path
    cpu: Path | None
    cpuacct: Path | None

    def all(self) -> list[Path]:
        return list(dict.fromkeys(path for path in (self.memory, self.pids, self.cpu, self.cpuacct) if path is not None))


def find_roots() -> Roots:
    """Where groups that limit memory and processes can be made, tried by making one. SandboxMissing says why there is nowhere."""
    own = _own_groups()
    found = {name: folder for name in ("memory", "pids", "cpu", "cpuacct") if (folder := _usable(own.get(name), name)) is not None}
    if "memory" in found and "pids" in found:
        return Roots(1, found["memory"], found["pids"], found.get("cpu"), found.get("cpuacct"))
    if (root := _usable_v2(own.get(""))) is not None:
        return Roots(2, root, root, root, root)
    raise SandboxMissing(
        "no control group for memory and processes can be made here: run as root with /sys/fs/cgroup mounted writable, or as a user whom systemd"
        " delegates them to (`systemd-run --user --scope -p Delegate=yes ...`), or accept the level 'rlimits'"
    )


def _own_groups() -> dict[str, Path]:
    """The folder of this process's own group by controller; under "" that of version 2."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    folders = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        for name, path in paths.items():
            if (kind == "cgroup" and name and name in options.split(",")) or (kind == "cgroup2" and not name):
                inside = os.path.relpath(path, root) if path.startswith(root) else "."  # a namespace shows the group as the root of its mount
                folders[name] = Path(point) / inside
    return folders


def _usable(folder: Path | None, controller: str) -> Path | None:
    """`folder` if a group can be made in it that this process may put others into."""
    if folder is None:
        return None
    tried = folder / f"{_prefix()}-try-{next(_numbers)}"
    try:
        tried.mkdir()
    except OSError:
        return None
    try:
        return folder if os.access(tried / "cgroup.procs", os.W_OK) else None
    finally:
        tried.rmdir()


def _usable_v2(folder: Path | None) -> Path | None:
    """Of `folder` and those above it, the nearest whose children have both controllers: one that holds processes itself can't give them any."""
    while folder is not None and (folder / "cgroup.controllers").exists():
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        given = set((folder / "cgroup.subtree_control").read_text().split())
        if {"memory", "pids"} <= given and os.access(folder / "cgroup.procs", os.W_OK) and _usable(folder, "") is not None:
            return folder
        folder = folder.parent
    return None


class Group:
    """One sandbox's group. `close` may be called whenever; what a process leaves that is killed, `remove_leftovers` of another one removes."""

    def __init__(self, roots: Roots, limits: SandboxLimits) -> None:
        """Memory: that of the processes and of every writable folder together, whose pages count as well."""
        self._roots, self._name = roots, f"{_prefix()}-{next(_numbers)}"
        try:
            self._make(limits)
        except OSError:
            self.close()  # of several controllers' folders some may be there
            raise
        self.limits_processors = (roots.memory / self._name / "cpu.max").exists() if roots.version == 2 else roots.cpu is not None

    def _make(self, limits: SandboxLimits) -> None:
        roots = self._roots
        memory, quota = limits.memory + 2 * limits.disk + SHARED_MEMORY, str(int(limits.processors * _PERIOD_US))
        for root in roots.all():
            (root / self._name).mkdir()
        if roots.version == 1:
            self._write(roots.memory, "memory.limit_in_bytes", str(memory))
            self._write(roots.memory, "memory.memsw.limit_in_bytes", str(memory), needed=False)  # absent without accounting of swap
            if roots.cpu is not None:
                self._write(roots.cpu, "cpu.cfs_period_us", str(_PERIOD_US))
                self._write(roots.cpu, "cpu.cfs_quota_us", quota)
        else:
            self._write(roots.memory, "memory.max", str(memory))
            self._write(roots.memory, "memory.swap.max", "0", needed=False)
            self._write(roots.memory, "cpu.max", f"{quota} {_PERIOD_US}", needed=False)
        self._write(roots.pids, "pids.max", str(limits.processes + 1))  # process 1 is the sandbox's own

    def add(self, pid: int) -> None:
        for root in self._roots.all():
            self._write(root, "cgroup.procs", str(pid))

    def out_of_memory(self) -> int:
        """Processes that were ended for want of memory."""
        return self._count(self._roots.memory, "memory.oom_control" if self._roots.version == 1 else "memory.events", "oom_kill")

    def refused_processes(self) -> int:
        """How often a process was refused because there were too many."""
        return self._count(self._roots.pids, "pids.events", "max")

    def peak_memory(self) -> int | None:
        """Bytes; None where the kernel doesn't keep it."""
        return self._number(self._roots.memory, "memory.max_usage_in_bytes" if self._roots.version == 1 else "memory.peak")

    def cpu_s(self) -> float | None:
        """Seconds of processor time; None where they are not counted."""
        if self._roots.version == 2:
            return self._count(self._roots.memory, "cpu.stat", "usage_usec") / 1e6
        spent = self._number(self._roots.cpuacct, "cpuacct.usage") if self._roots.cpuacct is not None else None
        return spent / 1e9 if spent is not None else None

    def close(self) -> bool:
        """Whether it is gone; False as long as it holds a process."""
        left = [root for root in self._roots.all() if not _removed(root / self._name)]  # each is tried
        return not left

    def _write(self, root: Path, name: str, text: str, needed: bool = True) -> None:
        try:
            (root / self._name / name).write_text(text)
        except OSError:
            if needed:
                raise

    def _number(self, root: Path, name: str) -> int | None:
        try:
            return int((root / self._name / name).read_text())
        except OSError:
            return None

    def _count(self, root: Path, name: str, key: str) -> int:
        with contextlib.suppress(OSError):
            for line in (root / self._name / name).read_text().splitlines():
                if line.split()[0] == key:
                    return int(line.split()[1])
        return 0


SHARED_MEMORY = 16 * 2**20
"""Bytes of a sandbox's /dev/shm."""


def remove_leftovers(roots: Roots) -> int:
    """Ends and removes the groups of processes of this namespace that are gone; how many there were."""
    namespace, count = _namespace(), 0
    for root in roots.all():
        for folder in root.glob(f"{_PREFIX}-{namespace}-*"):
            found = re.fullmatch(rf"{_PREFIX}-{namespace}-(\d+)-(\d+)-.*", folder.name)
            if found is None or _started(int(found[1])) == found[2]:
                continue
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)
            count += _removed(folder)
    return count


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # it holds a process that is about to end, or it isn't ours
        return False
    return True


def _prefix() -> str:
    """Names this process for good: ids are used again, and other namespaces that share the folder have the same ids."""
    return f"{_PREFIX}-{_namespace()}-{os.getpid()}-{_started(os.getpid())}"


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None if there is none, or if it has ended and is only not waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
