"""What this machine offers to make sandboxes of, found by trying it; and the command that makes one."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rollart.sandbox import cgroups, seccomp
from rollart.sandbox.limits import LEVELS, Level, SandboxLimits, SandboxMissing

ACCEPT = "rollart.sandbox.accept"
"""The key of Dask's configuration that names the weakest level that is acceptable (DASK_ROLLART__SANDBOX__ACCEPT); by default the strongest."""

PACKAGES = "/opt/packages"
_USER = 1000


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is: bubblewrap's path, the filter of system calls, where groups can be made (None: the level is `rlimits`)."""

    bubblewrap: str
    filter: bytes
    roots: cgroups.Roots | None

    @property
    def level(self) -> Level:
        return "rlimits" if self.roots is None else "cgroups"


def machine(accept: Level | None = None) -> Machine:
    """The strongest that this machine has, if it is no weaker than `accept` (default: Dask's configuration); else SandboxMissing."""
    import dask.config  # not before: it reads the environment once, at its import, and the command line has something to say in it

    accept = accept or dask.config.get(ACCEPT, LEVELS[0])
    if accept not in LEVELS:
        raise SandboxMissing(f"{ACCEPT} is {accept!r}; the levels are {', '.join(LEVELS)}")
    bubblewrap = _bubblewrap()
    found, why = _roots()
    if found is None and accept == "cgroups":
        raise SandboxMissing(f"no sandbox of level 'cgroups': {why}, by {ACCEPT} (DASK_ROLLART__SANDBOX__ACCEPT=rlimits)")
    if found is None and os.geteuid() == 0:
        raise SandboxMissing(f"no sandbox of level 'rlimits' for root, whose processes no rlimit counts: run as an ordinary user ({why})")
    return Machine(bubblewrap, seccomp.program(), found)


@cache
def _bubblewrap() -> str:
    if platform.system() != "Linux":
        raise SandboxMissing(f"sandboxes need Linux's namespaces, and this is {platform.system()}")
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxMissing("no sandbox: bubblewrap is not installed; `apt install bubblewrap` (version 0.8 or later)")
    if "--disable-userns" not in subprocess.run([path, "--help"], capture_output=True, text=True, check=False).stdout:
        raise SandboxMissing(f"no sandbox: {path} lacks --disable-userns; install bubblewrap 0.8 or later")
    return path


@cache
def _roots() -> tuple[cgroups.Roots | None, str]:
    """Where groups can be made, and why not if nowhere; once a process, and what ended ones left is removed then."""
    try:
        roots = cgroups.find_roots()
    except SandboxMissing as error:
        return None, str(error)
    cgroups.remove_leftovers(roots)
    return roots, ""


def interpreter() -> str:
    """The folder that holds Python's `bin` inside: the system's own, or this process's, read-only and under a path that tells nothing."""
    return sys.base_prefix if Path(sys.base_prefix).is_relative_to("/usr") else "/opt/python"


def environment(packages: bool) -> dict[str, str]:
    """All that a command finds in its environment unless it is given more."""
    found = {
        "PATH": f"{interpreter()}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    return found | {"PYTHONPATH": PACKAGES} if packages else found


def command(machine: Machine, limits: SandboxLimits, packages: bool, descriptors: dict[str, int], settings: str) -> list[str]:
    """What starts the sandbox, up to process 1 in it. `descriptors`: `seccomp`, `info`, `passwd`, `group` and `hosts`."""
    argv = [machine.bubblewrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    argv += ["--unshare-cgroup", "--disable-userns", "--uid", str(_USER), "--gid", str(_USER), "--hostname", "sandbox"]
    argv += ["--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1", "--clearenv"]
    for name, value in environment(packages).items():
        argv += ["--setenv", name, value]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if (link := Path("/", name)).is_symlink():
            argv += ["--symlink", os.readlink(link).removeprefix("/"), str(link)]
        elif link.is_dir():
            argv += ["--ro-bind", str(link), str(link)]
    for name in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"):
        argv += ["--ro-bind-try", name, name]
    for name in ("passwd", "group", "hosts"):
        argv += ["--ro-bind-data", str(descriptors[name]), f"/etc/{name}"]
    if interpreter() == "/opt/python":
        argv += ["--ro-bind", sys.base_prefix, "/opt/python"]
    if packages:
        argv += ["--ro-bind", sysconfig.get_path("purelib"), PACKAGES]
    argv += ["--proc", "/proc"]
    for name in _KERNEL:
        if Path(name).is_dir():
            argv += ["--size", "4096", "--tmpfs", name, "--remount-ro", name]
    argv += ["--dev", "/dev", "--size", str(cgroups.SHARED_MEMORY), "--tmpfs", "/dev/shm"]
    argv += ["--size", str(limits.disk), "--tmpfs", "/tmp", "--size", str(limits.disk), "--tmpfs", "/workspace"]
    argv += ["--ro-bind", str(Path(__file__).with_name("inside.py")), "/run/inside.py"]
    argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/workspace"]
    argv += ["--info-fd", str(descriptors["info"]), "--seccomp", str(descriptors["seccomp"])]
    python = f"{interpreter()}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    return [*argv, "--", python, "-I", "-S", "-B", "/run/inside.py", settings]


_KERNEL = ("/proc/sys", "/proc/acpi", "/proc/scsi", "/proc/fs", "/proc/pressure")
"""What sets the machine's kernel, hidden by an empty folder: where root starts a sandbox its files are root's, and bubblewrap leaves the first of
these writable with --disable-userns."""

FILES = {
    "passwd": f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\nagent:x:{_USER}:{_USER}:agent:/tmp:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{_USER}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
"""What stands in /etc, since programs look their user up."""
