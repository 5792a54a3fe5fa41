"""The system calls that are refused in a sandbox, as a filter program; libseccomp makes it, bubblewrap installs it."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from functools import cache

from rollart.sandbox.limits import SandboxMissing

REFUSED = (
    # other namespaces, mounts, roots
    "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "open_by_handle_at", "name_to_handle_at", "quotactl", "quotactl_fd", "swapon", "swapoff", "fanotify_init",
    # other processes' memory and registers
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd",
    # parts of the kernel with a history of holes, or that reach beyond namespaces
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "keyctl", "add_key", "request_key",
    "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "syslog", "acct", "iopl", "ioperm", "settimeofday",
    "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname", "lookup_dcookie", "uselib", "modify_ldt", "vhangup", "nfsservctl",
    "personality", "mbind", "migrate_pages", "move_pages", "set_mempolicy",
    # would undo the limit on processors where an affinity sets it
    "sched_setaffinity",
)  # fmt: skip

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Sockets that are allowed: the network namespace has nothing but its own loopback. Others, AF_VSOCK above all, are not all divided by namespaces."""

_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWNS, NEWCGROUP and NEWTIME in the flags of clone(2)."""

_TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which put text into a terminal's input."""


@cache
def program() -> bytes:
    """The filter, as bubblewrap's --seccomp reads it. SandboxMissing without pyseccomp or libseccomp."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:  # the last two where it does not find the library
        raise SandboxMissing(
            f"no system call filter can be made here ({error}): `pip install 'rollart[sandbox]'` and `apt install libseccomp2`"
        ) from error
    denied = pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(defaction=pyseccomp.ALLOW)
    for name in REFUSED:
        try:
            rules.add_rule(denied, name)
        except (ValueError, OSError):  # this libseccomp, or this architecture, has no such call: then clone3's rule below covers what it's for
            if name in ("unshare", "setns", "mount", "ptrace", "bpf"):
                raise
    for bit in range(32):
        if _NEW_NAMESPACES >> bit & 1:
            rules.add_rule(denied, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 1 << bit, 1 << bit))
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags lie in memory, which no filter reads; the C library falls back to clone
    for request in _TERMINAL:
        rules.add_rule(denied, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request))
    allowed = sorted(int(family) for family in FAMILIES)
    for call in ("socket", "socketpair"):
        for family in range(allowed[-1]):
            if family not in allowed:
                rules.add_rule(denied, call, pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0xFFFFFFFF, family))
        rules.add_rule(denied, call, pyseccomp.Arg(0, pyseccomp.GT, allowed[-1]))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        return os.pread(file.fileno(), 1 << 20, 0)
