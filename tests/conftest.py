"""A run of the command line as its user sees it: a process of its own session, what it says, and which of its processes are left.

For `integration/` and `faults/`, whose tests share the small configuration below.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import hypothesis
import psutil
import pytest

hypothesis.settings.register_profile("repeated", derandomize=True)
hypothesis.settings.register_profile("searched", derandomize=False, print_blob=True)
hypothesis.settings.load_profile("repeated")  # the same examples every time: a change is judged by what it changes; `make search` draws others


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stores", choices=["quick", "real"], default="quick",
        help="which servers stand for object stores in tests/storage: moto alone, or SeaweedFS and fake-gcs-server (`make stores`)",
    )  # fmt: skip
    parser.addoption("--seeds", type=int, default=2, help="how many runs tests/faults/test_chaos.py kills at random (`make chaos`: 20)")
    parser.addoption("--first-seed", type=int, default=0, help="the seed of the first of them")


PATIENCE_S = 600.0
"""How long anything may take: much longer than it does, since tests share the machine, and a run starts many processes that import torch."""

GONE_S = 20.0
"""Within which processes whose owner was killed have to be gone; it takes them a second or two."""

CONFIG = """
run: {dashboard_port: 0, seed: 3}
hardware:
  trainer: {resource: TRAIN, slots: 1}
  engine: {resource: GENERATE, slots: 1}
  player: {resource: ENVIRONMENT, slots: 48}
  judge: {resource: REWARD, slots: 4}
stages: {train: trainer, generate: engine, environment: player, reward: judge}
policy:
  tiny: {vocab: 300, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 32, max_length: 96}
tasks:
  - name: guess_number
    environment: guess_number
    settings: {lowest: 1, highest: 3, turns: 2}
    weight: 2
    group_size: 4
    run_in: loop
    max_turns: 2
    max_new_tokens: 2
    max_tokens: 80
  - name: chain_sum
    environment: reasoning
    settings: {family: chain_sum, shown: "problem: (.*)", config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
    reward: reasoning
    score_in: future
    weight: 1
    group_size: 3
    run_in: loop
    max_new_tokens: 3
    max_tokens: 64
warm_up: {steps: 25, batch: 24, episodes: {guess_number: 48, chain_sum: 48}, optimiser: {lr: 1.0e-2, decay: constant}}
train: {steps: 5, groups: 6, alpha: 1, checkpoint_every: 2}
training:
  optimiser: {lr: 1.0e-3, decay: constant}
  loss: {name: decoupled_ppo, clip_low: 0.2, clip_high: 0.2, truncate: 2.0, entropy: 0.01}
engine: {slots: 32, max_length: 96}
rollout: {flush: 0.05}
evaluate: {episodes: 12, every: 3, every_episodes: 6}
"""


class Place:
    """A folder with the configuration, the runs and the temporary files of the processes that are started here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Running] = []
        self.config = folder / "tiny.yaml"
        self.config.write_text(CONFIG)

    def run(self, name: str) -> Path:
        """The folder of the run called `name`."""
        return self.folder / "runs" / name

    def start(self, name: str, *overrides: str, resume: bool = False, flow: str = "train") -> Running:
        """Starts `rollart run FLOW` on the run called `name`, in a session of its own as a terminal would."""
        temporary = self.folder / f"tmp-{name}"
        temporary.mkdir(exist_ok=True)
        settings = [f"run.root={self.folder / 'runs'}", f"run.name={name}", *overrides]
        command = [
            sys.executable, "-m", "rollart", "run", flow, "--config", str(self.config),
            *(part for s in settings for part in ("--set", s)), *(["--resume"] if resume else []),
        ]  # fmt: skip
        running = Running(command, self.run(name), temporary)
        self.started.append(running)
        return running

    def finish(self, name: str, *overrides: str, resume: bool = False, flow: str = "train") -> Running:
        """Starts a run, waits for its end and expects it to be a good one."""
        running = self.start(name, *overrides, resume=resume, flow=flow)
        assert running.wait() == 0, running.heard
        return running

    def metrics(self, name: str, kind: str) -> list[dict[str, Any]]:
        """The metrics lines of this kind, in the order of writing."""
        from rollart.dashboard.metrics import read_metrics

        return [line for line in read_metrics(str(self.run(name))) if line["kind"] == kind]

    def weights(self, name: str) -> Any:
        """The store of the run's versions."""
        from storage.weights import WeightStore

        return WeightStore(str(self.run(name) / "weights"))

    def checkpoints(self, name: str) -> Any:
        """The store of the run's checkpoints."""
        from storage.checkpoints import CheckpointStore

        return CheckpointStore(str(self.run(name) / "checkpoints"))

    def journal(self, name: str) -> Any:
        """The log of what the run's coordinators committed."""
        from rollart.journal import Journal
        from storage.objects.store import ObjectStore

        return Journal(ObjectStore(str(self.run(name))))

    def trajectories(self, name: str) -> Any:
        """A pandas frame of the run's compacted trajectories."""
        import pandas as pd

        return pd.concat([pd.read_parquet(p) for p in sorted((self.run(name) / "trajectories").glob("*.parquet"))], ignore_index=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place that the tests of a module share; whatever a failed test left running ends with it."""
    place = Place(tmp_path_factory.mktemp("runs"))
    yield place
    for running in place.started:
        running.kill_all()


class Running:
    """A started command. `heard` is what it has written to stderr so far; everything of its session is `alive`."""

    def __init__(self, command: list[str], folder: Path, temporary: Path) -> None:
        self.folder, self.temporary = folder, temporary
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._texts = {"out": "", "err": ""}
        self._news = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for thread in (*self._readers, threading.Thread(target=self._end, daemon=True)):
            thread.start()

    def _end(self) -> None:
        """Whoever waits for a line has nothing to wait for any more."""
        self.process.wait()
        with self._news:
            self._news.notify_all()

    def _read(self, name: str, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            with self._news:
                self._texts[name] += line
                self._news.notify_all()

    @property
    def heard(self) -> str:
        return self._texts["err"]

    @property
    def printed(self) -> str:
        return self._texts["out"]

    def says(self, text: str, times: int = 1) -> None:
        """Returns once stderr holds `text`, that often."""
        assert self.hears(text, times), f"never said {text!r} {times} times: {self.heard}"

    def hears(self, text: str, times: int = 1) -> bool:
        """Returns once stderr holds `text`, that often, or the command has ended: whether it does."""
        with self._news:
            there = self._news.wait_for(lambda: self.heard.count(text) >= times or self.process.poll() is not None, PATIENCE_S)
            return there and self.heard.count(text) >= times

    def grows_to(self, count: int) -> None:
        """Returns once the session has `count` processes."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.alive()) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, f"never had {count} processes: {self.heard}"
            time.sleep(0.05)  # others start them: there is no event to wait for

    def wait(self) -> int:
        """The exit code, with everything heard and printed."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"did not end: {self.heard}") from None
        for reader in self._readers:
            reader.join(GONE_S)
        return code

    def interrupt(self) -> None:
        """Ctrl-C: a terminal sends it to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def alive(self) -> list[psutil.Process]:
        """The processes of the session, whoever their parent is by now."""
        found = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) == self.process.pid:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
            except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                continue
        return found

    def left(self, seconds: float = 2.0) -> list[str]:
        """The command lines of what is still alive after at most `seconds`: the system's own helpers see only then that their owner is gone."""
        _, left = psutil.wait_procs(self.alive(), timeout=seconds)
        return [" ".join(p.cmdline()) for p in self.alive()] if left else []

    def process_like(self, matches: Callable[[str], bool]) -> psutil.Process:
        """The one process of the session whose command line matches."""
        (found,) = [p for p in self.alive() if matches(" ".join(p.cmdline()))]
        return found

    def worker(self, name: str) -> psutil.Process:
        """The worker process that the local cluster calls `name`, as the run's own Dask dashboard tells it."""
        (port,) = [int(address.rpartition(":")[2]) for address, called in self._workers() if called == name]
        listening = {c.laddr.port: p for p in self.alive() for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        return listening[port]

    def is_given(self, task: str, seconds: float) -> bool:
        """Whether, within so long, the scheduler has given some worker a task called `task` that has not ended yet."""
        deadline = time.monotonic() + seconds
        while not any(f">{task}-" in self._processing(address) for address, _ in self._workers()):
            assert self.process.poll() is None, f"ended before it gave anybody {task}: {self.heard}"
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)  # the dashboard tells it when it is asked
        return True

    def _workers(self) -> list[tuple[str, str]]:
        """Address and name of each worker that the scheduler has."""
        return re.findall(r"(tcp://[^<\s]*:\d+)</a></td>\s*<td>\s*(\S+)\s*</td>", self._told("main/workers"))

    def _processing(self, address: str) -> str:
        return self._told(f"worker/{quote(address, safe='')}").partition("Processing")[2]

    def _told(self, page: str) -> str:
        """A page of the run's own Dask dashboard."""
        (dashboard,) = re.findall(r"Dask dashboard: (http://\S+)/status", self.heard)
        with urllib.request.urlopen(f"{dashboard}/info/{page}.html", timeout=GONE_S) as answer:
            return str(answer.read().decode())

    def kill_all(self) -> None:
        for process in self.alive():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    @property
    def shared_memory(self) -> Path:
        """Where the weights' cache of this run is while it goes on."""
        digest = hashlib.sha256(str(self.folder / "weights").encode()).hexdigest()[:12]
        return Path("/dev/shm") / f"rollart-weights-{os.getuid()}-{digest}"
