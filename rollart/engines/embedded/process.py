"""Manners of a child process: bind first, die with the parent, leave Ctrl-C to the owner. Runs before any heavy import."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading

__all__ = ["PortInUse", "bind", "die_with_parent", "follow_parent", "ignore_interrupt"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded here, since between fork and exec nothing should be


class PortInUse(OSError):
    """The address asked for cannot be listened at."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, taken before a model is loaded so that a taken port costs no time; PortInUse if it is taken."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise PortInUse(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port (0 takes a free one)") from error
    return sock


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """On Linux this process gets that signal when the thread that started it is gone; elsewhere nothing happens."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def follow_parent() -> None:
    """Ends this process at once when its standard input closes, and on Linux also when the thread that started it is gone."""
    die_with_parent()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()


def ignore_interrupt() -> None:
    """A terminal's Ctrl-C reaches the whole process group; whether an engine ends is its owner's decision."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
