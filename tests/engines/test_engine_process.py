"""How an engine process behaves towards the one that started it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import psutil
import pytest


@pytest.fixture
def folder(tiny, tmp_path):
    tiny.model().save_pretrained(tmp_path)
    return str(tmp_path)


def test_it_ends_when_its_stdin_closes(folder, engine_process, engine_url):
    with engine_process("--model", folder) as process:
        engine_url(process)
        process.stdin.close()
        assert process.wait(5) == 0


def test_it_ends_when_its_stdin_closes_before_it_is_healthy(folder):
    command = [sys.executable, "-m", "rollart.engines.embedded", "--model", folder]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False).stdout == b""


def test_it_dies_with_a_killed_parent_whose_pipe_someone_else_holds(folder):
    # The grandchild inherits the write end of the pipe, so that stdin does not close: the death signal has to do it.
    parent = subprocess.Popen(
        [sys.executable, "-c", f"""
import os, subprocess, sys
read, write = os.pipe()
os.set_inheritable(write, True)
engine = subprocess.Popen([sys.executable, "-m", "rollart.engines.embedded", "--model", {folder!r}], stdin=read, stdout=subprocess.PIPE, text=True)
engine.stdout.readline()
holder = subprocess.Popen(["sleep", "60"], close_fds=False)
print(engine.pid, holder.pid, flush=True)
sys.stdin.read()
"""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    engine, holder = (psutil.Process(int(p)) for p in parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait(10)
        gone, alive = psutil.wait_procs([engine], timeout=10)
        assert gone and not alive
    finally:
        holder.kill()


def test_a_terminals_interrupt_is_left_to_the_owner_and_sigterm_ends_it(folder, engine_process, engine_url):
    with engine_process("--model", folder) as process:
        url = engine_url(process)
        process.send_signal(signal.SIGINT)
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5):
            pass
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_port_in_use_is_one_line_and_exit_code_2(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "rollart.engines.embedded", "--model", folder, "--port", str(port), "--detached"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().splitlines() == [
        f"cannot listen at 127.0.0.1:{port}: Address already in use; choose another --port (0 takes a free one)"
    ]
