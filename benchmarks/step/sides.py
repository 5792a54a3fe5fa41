"""A trainer in a process of its own, which takes one step whenever it is asked to and says what that cost. Knows no trainer."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.step.batches import Shape

__all__ = ["LR", "Case", "Side", "SideLost", "Found", "Meter", "in_turns"]

LR = 1e-6
"""Small enough for the policies to stay what they are."""

Found = dict[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    """What a side steps on: the model in `folder`, in `dtype` with `threads` torch threads, and batches of `shape` with ids under
    `vocabulary`. `settings` are the side's own, `passes` into how many forward and backward passes TRL cuts its batch.

    `steps` is how many steps will be asked for, `trim` whether memory is the question (see `Meter`). Both sides take AdamW steps of `LR`,
    clipped to norm 1, with one update a batch.
    """

    folder: str
    dtype: str
    threads: int
    shape: Shape
    vocabulary: int
    steps: int
    settings: dict[str, Any]
    passes: int = 1
    trim: bool = False


class SideLost(RuntimeError):
    """A side's process ended before it answered; what it printed says why."""


class Side:
    """The process that `serve` runs in; more `arguments` go after the case and the connection. It sends {} when it is ready, then takes
    one step for each message and sends what that cost."""

    def __init__(self, serve: Callable[..., None], case: Case, *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._name = serve.__name__
        self._process = spawn.Process(target=serve, args=(case, theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process ends the pipe

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()

    def ask(self) -> None:
        """Has it take a step."""
        self._pipe.send(True)

    def answer(self) -> Found:
        """What it sends next. SideLost."""
        try:
            found: Found = self._pipe.recv()
        except EOFError as error:
            raise SideLost(f"{self._name}: the process ended before it answered; what it printed says why") from error
        return found

    def step(self) -> Found:
        """Takes one step."""
        self.ask()
        return self.answer()


def in_turns(sides: Mapping[str, Side], rounds: int) -> tuple[dict[str, Found], dict[str, list[Found]]]:
    """What each side's first step cost, which isn't counted, and what its others cost. They take turns, so that a machine whose load
    drifts burdens all."""
    for side in sides.values():
        side.answer()
    first = {name: side.step() for name, side in sides.items()}
    found: dict[str, list[Found]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            found[name].append(sides[name].step())
    return first, found


class Meter:
    """Measures this process from its making to `read`. With `trim`, what it has freed goes back to the system first: it would not show
    when it is taken again."""

    def __init__(self, *, trim: bool) -> None:
        if trim:
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak (Linux)
        self._held = int(psutil.Process().memory_info().rss)
        self._cpu = time.process_time()
        self._begun = time.perf_counter()

    def read(self) -> Found:
        """`seconds`, those of its threads on a core (`cpu_seconds`), and bytes at the peak of memory beyond those held in the beginning."""
        seconds, cpu = time.perf_counter() - self._begun, time.process_time() - self._cpu
        return {"seconds": seconds, "cpu_seconds": cpu, "extra_bytes": float(_peak() - self._held)}


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: peak memory can be measured on Linux only")
