"""The launcher of SGLang's server towards its owner and towards the server, for which a quick process stands here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollart.engines.errors import EngineDied
from rollart.engines.process import EngineProcess

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[str], str]:
    """An interpreter of an environment that has SGLang of that version, or none."""

    def make(version: str) -> str:
        path = tmp_path / "python"
        answer = f"echo {version}" if version else 'echo "No package metadata was found for sglang" >&2; exit 1'
        path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then {answer}; exit; fi\nshift 2\nexec {sys.executable} {FAKE} "$@"\n')
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def launch(interpreter: Callable[[str], str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the launcher; whatever is left of it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, version: str = "0.5.23") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rollart.engines.sglang", "--python", interpreter(version), "--", *arguments]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        (tmp_path / "temporary").mkdir()
        process = subprocess.Popen(command, **pipes, env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def healthy(process: subprocess.Popen[str]) -> tuple[dict[str, Any], list[psutil.Process]]:
    """What the launcher says once its server is healthy, and the server's processes."""
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    return said, psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.parametrize("how", ["stdin", "SIGTERM"])
def test_all_processes_end_when_the_owner_wants_it_or_is_gone(launch: Any, how: str, tmp_path: Path) -> None:
    process = launch()
    said, server = healthy(process)
    assert said["url"].startswith("http://127.0.0.1:") and said["pid"] == server[0].pid and len(server) == 2
    if how == "stdin":
        process.stdin.close()
    else:
        process.terminate()
    assert process.wait(10) == 0
    assert all_gone(server)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="a death signal of the parent is Linux's own")
def test_the_server_dies_with_a_launcher_that_is_killed_outright(launch: Any) -> None:
    process = launch()
    _, server = healthy(process)
    process.kill()
    assert all_gone(server[:1])  # SGLang's own further processes die with it in the same way; the one here does not
    server[1].kill()


def test_a_terminals_interrupt_reaches_neither(launch: Any) -> None:
    process = launch()
    _, server = healthy(process)
    process.send_signal(signal.SIGINT)
    assert psutil.wait_procs(server, timeout=0.3)[0] == [] and process.poll() is None


def test_a_server_that_is_gone_is_an_error_and_nothing_of_it_stays(launch: Any) -> None:
    process = launch()
    _, server = healthy(process)
    server[0].kill()
    assert process.wait(10) == 3
    assert all_gone(server)


async def test_why_a_server_did_not_come_up_is_told(interpreter: Callable[[str], str]) -> None:
    command = ["-m", "rollart.engines.sglang", "--python", interpreter("0.5.23"), "--", "--fail"]
    with pytest.raises(EngineDied, match="ended with code 3 before it was healthy: no such model"):
        await EngineProcess.start(command, {}, 60)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.5.20", "has SGLang 0.5.20, which is older than 0.5.21: it would not say which weights sampled which token"),
        ("0.4.9.post2", "has SGLang 0.4.9.post2, which is older than 0.5.21"),
        ("", "has no SGLang (No package metadata was found for sglang); install it there, or name another interpreter"),
    ],
)
def test_an_environment_with_none_or_an_old_one_is_refused_with_the_reason(launch: Any, version: str, said: str) -> None:
    process = launch(version=version)
    assert process.wait(60) == 2  # with stdin open, whose end would be an end of its own
    (line,) = process.stderr.read().strip().splitlines()
    assert process.stdout.read() == ""
    assert line.startswith("engine.sglang.python: ")
    assert said in line


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23", "0.6.0rc1", "1.0"])
def test_later_ones_are_taken(launch: Any, version: str) -> None:
    said, _ = healthy(launch(version=version))
    assert said["pid"] > 0


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollart.engines.sglang", "--python", str(tmp_path / "none")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert f"engine.sglang.python: {tmp_path}/none does not run" in process.stderr.read()
