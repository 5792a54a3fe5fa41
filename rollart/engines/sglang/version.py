"""Which versions of SGLang serve; asks the environment that has it, without importing it."""

from __future__ import annotations

import re
import subprocess

__all__ = ["OLDEST", "WrongSglang", "check_version"]

OLDEST = (0, 5, 21)
"""Before 0.5.20 a response didn't say which weights sampled which of its tokens, and 0.5.21 changed how weights are updated."""

ASK = "from importlib.metadata import version; print(version('sglang'))"
SECONDS = 60.0


class WrongSglang(RuntimeError):
    """The interpreter has no SGLang, or one that is too old; the message says which and what to do."""


def check_version(python: str) -> str:
    """The version of SGLang that the interpreter `python` has; WrongSglang if it is older than `OLDEST` or there is none."""
    try:
        asked = subprocess.run([python, "-c", ASK], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WrongSglang(f"engine.sglang.python: {python} does not run: {error}; name the interpreter of an environment with SGLang") from error
    if asked.returncode:
        last = asked.stderr.strip().rpartition("\n")[2]
        raise WrongSglang(f"engine.sglang.python: {python} has no SGLang ({last}); install it there, or name another interpreter")
    version = asked.stdout.strip()
    wanted = ".".join(map(str, OLDEST))
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None or tuple(int(part or 0) for part in found.groups()) < OLDEST:
        raise WrongSglang(
            f"engine.sglang.python: {python} has SGLang {version}, which is older than {wanted}: it would not say which weights sampled which "
            f"token, or take new weights otherwise; install {wanted} or newer"
        )
    return version
