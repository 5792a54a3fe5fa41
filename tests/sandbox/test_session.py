"""A sandbox in use: commands, files, what may be reached, and what is left when it ends by whatever end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollart.sandbox import cgroups, machine
from rollart.sandbox.limits import SandboxFailed, SandboxLimits, SandboxMissing
from rollart.sandbox.once import check, run_once
from rollart.sandbox.reach import Reach
from rollart.sandbox.session import Sandbox
from tests.sandbox.needs import needs_sandbox

PATIENCE_S = 60.0


def groups() -> list[Path]:
    roots = machine.machine().roots
    return [found for root in (roots.all() if roots else []) for found in root.glob("rollart-sandbox-*")]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@needs_sandbox
async def test_a_command_has_its_files_input_environment_and_tells_how_it_ended() -> None:
    script = "import sys, os; print(open('data/a.txt').read(), sys.stdin.read(), os.environ['WORD'], os.getcwd()); sys.stderr.write('e'); sys.exit(3)"
    files = {"data/a.txt": b"file", "main.py": script.encode()}
    result = await run_once(["python3", "main.py"], files, stdin=b"input", environment={"WORD": "word"})
    assert (result.status, result.ended, result.ok) == (3, "exited", False)
    assert (result.stdout, result.stderr) == (b"file input word /workspace\n", b"e")
    assert 0 < result.cpu_s < 10 and result.peak_memory > 1 << 20
    assert (await run_once(["no-such-program"])).status == 127


@needs_sandbox
async def test_a_session_keeps_its_workspace_until_it_is_cleared() -> None:
    async with Sandbox() as sandbox:
        await sandbox.write("tool.sh", b"#!/bin/sh\necho $1 > out\n", executable=True)
        assert (await sandbox.run(["./tool.sh", "one"])).ok
        assert await sandbox.read("out") == b"one\n"
        assert (await sandbox.run(["sh", "-c", "mkdir -p d/e; chmod 0 d/e d"])).ok
        await sandbox.clear()
        assert (await sandbox.run(["ls", "-A", "/workspace", "/tmp", "/dev/shm"])).stdout.split() == [b"/dev/shm:", b"/tmp:", b"/workspace:"]
    with pytest.raises(SandboxFailed, match="closed"):
        await sandbox.run(["true"])


@needs_sandbox
@pytest.mark.parametrize("unix", [False, True])
async def test_the_one_address_that_is_named_can_be_reached(unix: bool, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper() * 1000)
        await writer.drain()
        writer.close()

    path = str(tmp_path / "s")
    server = await (asyncio.start_unix_server(answer, path) if unix else asyncio.start_server(answer, "127.0.0.1", 0))
    async with server:
        target = path if unix else server.sockets[0].getsockname()[1]
        code = "import socket; s = socket.create_connection(('127.0.0.1', 8000)); s.sendall(b'hi'); s.shutdown(1); d = b''\n"
        code += "while c := s.recv(999): d += c\nprint(len(d), d[:4])"
        async with Sandbox(reach=Reach(8000, target)) as sandbox:
            for _ in range(2):
                assert (await sandbox.run(["python3", "-c", code])).stdout == b"2000 b'HIHI'\n"


@needs_sandbox
async def test_a_cancelled_command_leaves_nothing() -> None:
    before = {group.name for group in groups()}  # other tests' warm sandboxes may be this process's too
    sandbox = Sandbox()
    await sandbox.open()
    pid = sandbox._pid
    ours, theirs = socket.socketpair()
    running = asyncio.create_task(sandbox.run(["sh", "-c", "echo >&3; sleep 300"], passed=[theirs.detach()]))
    writing, _ = await asyncio.open_connection(sock=ours)
    async with asyncio.timeout(PATIENCE_S):
        await writing.read(1)  # the command runs
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not alive(pid)
    assert sandbox.closed and not [g for g in groups() if g.name not in before and f"-{psutil.Process().pid}-" in g.name]


HOST = """
import asyncio
from rollart.sandbox.session import Sandbox
async def main():
    async with Sandbox() as sandbox:
        print(sandbox._pid, flush=True)
        await sandbox.run(["sleep", "300"])
asyncio.run(main())
"""


@needs_sandbox
def test_a_killed_host_takes_its_sandbox_along_and_the_next_start_removes_its_group() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    inside = psutil.Process(int(host.stdout.readline()))
    host.send_signal(signal.SIGKILL)
    host.wait()
    assert psutil.wait_procs([inside], timeout=PATIENCE_S)[1] == []
    roots = machine.machine().roots
    if roots is not None:
        assert any(f"-{host.pid}-" in group.name for group in groups())
        assert cgroups.remove_leftovers(roots) > 0
        assert not any(f"-{host.pid}-" in group.name for group in groups())


@needs_sandbox
async def test_the_check_says_the_level() -> None:
    assert await check() == machine.machine().level


@pytest.fixture
def fresh() -> object:
    machine._bubblewrap.cache_clear()
    yield
    machine._bubblewrap.cache_clear()


def test_without_bubblewrap_it_says_what_to_install(fresh: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxMissing, match="apt install bubblewrap"):
        machine.machine()


@needs_sandbox
def test_a_weaker_level_is_taken_only_where_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_roots", lambda: (None, "no control group here"))
    with pytest.raises(SandboxMissing, match=r"no control group here.*rollart\.sandbox\.accept"):
        machine.machine()
    monkeypatch.setattr(machine.os, "geteuid", lambda: 1000)
    assert machine.machine("rlimits").level == "rlimits"
    with pytest.raises(SandboxMissing, match="levels are"):
        machine.machine("none")  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["memory", "wall_s", "processes"])
def test_a_limit_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SandboxLimits(**{field: 0})
