"""The thread that steps the scheduler; owns the hand-over between it and the HTTP side, and nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rollart.engines.embedded.scheduler import Scheduler

__all__ = ["EngineLoop"]

T = TypeVar("T")


class EngineLoop:
    """Runs steps while there is work and calls in between; whatever touches the scheduler goes through `call`.

    `on_crash` hears of an exception in a step: the engine cannot go on then, and its process should end.
    """

    def __init__(self, scheduler: Scheduler, on_crash: Callable[[BaseException], None]) -> None:
        self._scheduler = scheduler
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_crash = on_crash
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step it is in."""
        self._calls.put(None)
        self._thread.join()

    def post(self, action: Callable[[], None]) -> None:
        """Runs `action` between two steps; nobody hears of its result."""
        self._calls.put(action)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Runs `action` between two steps and hands back what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 (handed to the caller, who waits for it)
                future.set_exception(error)

        self._calls.put(run)
        return future

    def _run(self) -> None:
        try:
            while self._take_calls():
                if self._scheduler.has_work:
                    self._scheduler.step()
        except BaseException as error:  # noqa: BLE001 (a thread's exception reaches nobody unless it is handed on)
            self._on_crash(error)

    def _take_calls(self) -> bool:
        """Runs the calls that have come, waiting for one if there is nothing else to do; False once it is time to stop."""
        try:
            while True:
                action = self._calls.get(block=not self._scheduler.has_work)
                if action is None:
                    return False
                action()
        except queue.Empty:
            return True
