"""Compares mathematical texts with math-verify, a line of JSON each way; a process of its own, since its main thread is what that library's
time limit needs, and a process can be ended whatever it is at.
"""

import contextlib
import ctypes
import json
import resource
import signal
import sys

MEMORY = 2 << 30


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the process that started it
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from math_verify import parse, verify

    out = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        equal = False
        with contextlib.suppress(RecursionError, MemoryError):  # of a text of thousands of parentheses
            whole = asked["expected"] if "$" in asked["expected"] else f"${asked['expected']}$"  # what is expected is mathematics and nothing else
            expected, given = (parse(text, raise_on_error=False) for text in (whole, asked["given"]))
            equal = bool(expected) and bool(given) and bool(verify(expected, given, raise_on_error=False))
        out.write(json.dumps({"equal": equal}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
