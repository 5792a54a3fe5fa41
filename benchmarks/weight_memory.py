"""How much memory a publish or a pull takes beyond the caller's tensors; run in a process of its own, which has no earlier peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.weight_states import make, nbytes, touched
from storage.version import Version
from storage.weights import WeightStore

DOINGS = ("publish", "publish_background", "pull")


def peak_ratio(doing: str, state: str, url: str, options: dict[str, Any]) -> float:
    """Peak memory of `doing`, one of `DOINGS`, over the state's size. A pull reads version 0-0, which has to be there."""
    request = json.dumps([doing, state, url, options])
    done = subprocess.run([sys.executable, "-m", __name__], input=request, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _measure(doing: str, name: str, url: str, options: dict[str, Any]) -> float:
    state = make(name)
    store = WeightStore(url, options)
    # What the first call of anything imports and keeps isn't the operation's.
    small = {"warm": next(iter(state.values()))[:64].clone()}
    aside = WeightStore(f"{url}-warm-{doing}", options)
    aside.publish(small, version=Version(0, 0), background=False)
    aside.pull(Version(0, 0), out={"warm": small["warm"].clone()})
    out = touched(state) if doing == "pull" else {}
    before = _reset_peak()
    if doing == "pull":
        store.pull(Version(0, 0), out=out)
    else:
        store.publish(state, version=Version(0, 0), background=doing == "publish_background").result()
    return (_peak() - before) / nbytes(state)


def _reset_peak() -> int:
    """Forgets the process's peak memory (Linux); its present memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: peak memory can be measured on Linux only")


if __name__ == "__main__":
    print(_measure(*json.loads(sys.stdin.read())))
