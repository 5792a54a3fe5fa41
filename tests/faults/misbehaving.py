"""Environments and verifiers that misbehave, each at a first try only, once a test lets them: files in a folder say so."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from rollart.environments.guess_number import GuessNumber, GuessNumberSettings
from rollart.environments.protocol import StepResult
from rollart.rewards.protocol import Verdict
from rollart.types import Trajectory

FOLDER = "ROLLART_TEST_FOLDER"
"""The environment variable that names the folder for verifiers, which have no settings."""


def first(folder: str, what: str) -> bool:
    """Whether nothing called `what` has happened yet, since there is a file `begin`; of any number of racing callers one gets True."""
    if not (Path(folder) / "begin").exists():
        return False
    try:
        os.close(os.open(Path(folder) / what, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class FolderSettings(GuessNumberSettings):
    """`folder`: where it is noted what has happened."""

    folder: str


class Misbehaving(GuessNumber):
    """Of every seven episodes, one hangs in a reset, one raises in a step, one returns no text and one no result, each once."""

    Settings: ClassVar[type[GuessNumberSettings]] = FolderSettings

    def __init__(self, settings: FolderSettings) -> None:
        super().__init__(settings)
        self.folder, self.seed = settings.folder, 0

    def reset(self, seed: int) -> str:
        self.seed = seed
        if seed % 7 == 0 and first(self.folder, f"hung-{seed}"):
            threading.Event().wait()
        if seed % 7 == 1 and first(self.folder, f"no-text-{seed}"):
            return 7  # type: ignore[return-value]
        return super().reset(seed)

    def step(self, action: str) -> StepResult:
        if self.seed % 7 == 2 and first(self.folder, f"raised-{self.seed}"):
            raise OSError("the simulator is gone")
        if self.seed % 7 == 3 and first(self.folder, f"no-result-{self.seed}"):
            return StepResult("", float("nan"), True, False, {})
        return super().step(action)


class Swallowing(GuessNumber):
    """Hangs in every reset in the first process that is asked for one once it may, and plays in every other."""

    Settings: ClassVar[type[GuessNumberSettings]] = FolderSettings

    def __init__(self, settings: FolderSettings) -> None:
        super().__init__(settings)
        self.folder = settings.folder

    def reset(self, seed: int) -> str:
        if first(self.folder, "swallowed"):
            (Path(self.folder) / f"swallower-{os.getpid()}").touch()
        if (Path(self.folder) / f"swallower-{os.getpid()}").exists():
            threading.Event().wait()
        return super().reset(seed)


class Slow(GuessNumber):
    """Takes a few hundredths of a second for a step, so that there is something to kill."""

    def step(self, action: str) -> StepResult:
        time.sleep(random.uniform(0.01, 0.05))
        return super().step(action)


def verdict(trajectory: Trajectory) -> Verdict:
    """The environment's reward; of every seven trajectories one hangs here, one raises, and the first of all ends its worker, each once."""
    folder, attempt = os.environ[FOLDER], trajectory.attempt
    name = f"{attempt.episode.purpose}-{attempt.episode.index}-{attempt.member}"
    if attempt.episode.purpose == "train":
        if first(folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        kind = (attempt.episode.index * 4 + attempt.member) % 7
        if kind == 0 and first(folder, f"hung-{name}"):
            threading.Event().wait()
        if kind == 1 and first(folder, f"raised-{name}"):
            raise OSError("the judge is out of order")
    return _of(trajectory)


def slow_verdict(trajectory: Trajectory) -> Verdict:
    """1 for every other member of a group, so that there is something to learn, after a few hundredths of a second."""
    time.sleep(random.uniform(0.01, 0.05))
    return Verdict(float(trajectory.attempt.member % 2))


def _of(trajectory: Trajectory) -> Verdict:
    said: dict[str, Any] = trajectory.info
    return Verdict(trajectory.environment_reward, reason=str(said.get("number", "")))


class Greedy(GuessNumber):
    """Takes more memory than a worker may have, in one reset of one process, and keeps it."""

    Settings: ClassVar[type[GuessNumberSettings]] = FolderSettings
    kept: ClassVar[list[bytes]] = []

    def __init__(self, settings: FolderSettings) -> None:
        super().__init__(settings)
        self.folder = settings.folder

    def reset(self, seed: int) -> str:
        if first(self.folder, "took"):
            (Path(self.folder) / "taker").write_text(str(os.getpid()))
            self.kept.append(b"x" * 2**30)
            threading.Event().wait()
        return super().reset(seed)
