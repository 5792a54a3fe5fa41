"""What untrusted code tries, each really run: it gets nowhere, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import textwrap
from pathlib import Path

import psutil
import pytest

from rollart.sandbox.limits import MIB, SandboxFileError, SandboxLimits, SandboxResult
from rollart.sandbox.session import Sandbox
from tests.sandbox.needs import needs_sandbox

pytestmark = needs_sandbox

LIMITS = SandboxLimits(memory=96 * MIB, disk=8 * MIB, file_size=4 * MIB, processes=24, wall_s=30.0, cpu_s=10.0, output=64 * 1024)


async def attempt(code: str, limits: SandboxLimits = LIMITS) -> SandboxResult:
    async with Sandbox(limits) as sandbox:
        return await sandbox.run(["python3", "-I", "-c", textwrap.dedent(code)])


def running(mark: str) -> list[int]:
    """Processes of this machine with `mark` on their command line."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(mark in part for part in p.info["cmdline"] or [])]


async def test_a_fork_bomb_is_refused_more_processes_and_ends() -> None:
    result = await attempt("import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)")
    assert (result.ended, result.status) == ("processes", 1)
    assert b"Resource temporarily unavailable" in result.stderr


async def test_a_memory_bomb_is_ended_and_so_is_one_of_many_processes() -> None:
    assert (await attempt("x = bytearray(2_000_000_000)")).ended == "memory"
    many = "import os, time\nfor _ in range(8):\n    if os.fork() == 0: x = bytearray(60_000_000); time.sleep(60)\nos.wait(); raise SystemExit(3)"
    assert (await attempt(many)).ended == "memory"


async def test_endless_output_is_cut_and_ended() -> None:
    result = await attempt("while True: print('a' * 1000)")
    assert (result.ended, len(result.stdout)) == ("output", LIMITS.output)
    result = await attempt("import sys\nwhile True: sys.stderr.write('a' * 1000)")
    assert (result.ended, len(result.stderr)) == ("output", LIMITS.output)


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
async def test_a_disk_is_full_at_its_limit(folder: str) -> None:
    code = f"""
    import os
    written = 0
    try:
        for number in range(100):
            with open(f"{folder}/{{number}}", "wb", buffering=0) as file:
                for _ in range(3):
                    written += file.write(bytes(1 << 20))
    except OSError as error:
        print(error.errno, written >> 20)
    """
    error, written = (await attempt(code)).stdout.split()
    assert error == b"28" and int(written) <= 16  # ENOSPC


async def test_a_large_file_is_refused() -> None:
    code = "f = open('/workspace/a', 'wb', buffering=0)\ntry:\n    [f.write(bytes(1 << 20)) for _ in range(20)]\nexcept OSError as e: print(e.errno)"
    assert (await attempt(code)).stdout == b"27\n"  # EFBIG


async def test_the_network_is_empty_and_the_hosts_loopback_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
        import socket
        for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_INET, ("1.1.1.1", 53)), (socket.AF_INET6, ("::1", {port}))):
            try:
                socket.socket(family).connect(address); print("connected")
            except OSError as error: print(type(error).__name__)
        for family in (socket.AF_NETLINK, socket.AF_PACKET, 40):
            try:
                socket.socket(family, socket.SOCK_RAW); print("made")
            except OSError as error: print(error.errno)
        try:
            s = socket.socket(socket.AF_UNIX); s.connect("\\0/tmp/.X11-unix/X0"); print("connected")
        except OSError as error: print(type(error).__name__)
        """
        assert (await attempt(code)).stdout.split() == [
            b"ConnectionRefusedError", b"OSError", b"ConnectionRefusedError", b"1", b"1", b"1", b"ConnectionRefusedError",
        ]  # fmt: skip


async def test_the_hosts_files_and_environment_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    (tmp_path / "secret").write_text("swordfish")
    paths = [
        "/etc/shadow",
        "/root",
        str(Path.home() / ".ssh"),
        __file__,
        str(tmp_path / "secret"),
        "/work",
        "/var",
        "/sys/kernel",
        "/proc/1/root/usr",
    ]
    code = f"""
    import os
    print([path for path in {paths!r} if os.path.exists(path)])
    print([name for name in os.environ if "SECRET" in name], sorted(int(p) for p in os.listdir("/proc") if p.isdigit()) == [1, os.getpid()])
    try: print(open("/proc/1/environ").read())
    except OSError as error: print(type(error).__name__)
    """
    assert (await attempt(code)).stdout.decode().splitlines() == ["[]", "[] True", "PermissionError"]


async def test_it_ends_neither_its_parent_nor_a_process_of_the_host() -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        code = f"""
        import os, signal
        for pid in (1, {os.getpid()}, {bystander.pid}):
            try: os.kill(pid, signal.SIGKILL); os.kill(pid, signal.SIGSTOP); print("sent")
            except OSError as error: print(type(error).__name__)
        print(os.getppid())
        """
        async with Sandbox(LIMITS) as sandbox:
            result = await sandbox.run(["python3", "-I", "-c", textwrap.dedent(code)])
            assert result.stdout.split() == [b"sent", b"ProcessLookupError", b"ProcessLookupError", b"1"]
            assert (await sandbox.run(["echo", "on"])).stdout == b"on\n"
            ended = await sandbox.run(["python3", "-I", "-c", "import os, signal; os.kill(0, signal.SIGKILL)"])
            assert (ended.ended, ended.status) == ("signalled", -signal.SIGKILL)
            assert (await sandbox.run(["echo", "on"])).stdout == b"on\n"
        assert bystander.returncode is None
    finally:
        bystander.kill()
        await bystander.wait()


async def test_what_was_daemonised_does_not_survive_its_command() -> None:
    mark = "marked-to-survive"
    code = f"""
    import os, subprocess, sys
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            subprocess.Popen(["sleep", "300"], start_new_session=True)
            os.execvp(sys.executable, [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)", "{mark}"])
        os._exit(0)
    """
    async with Sandbox(LIMITS) as sandbox:
        assert (await sandbox.run(["python3", "-I", "-c", textwrap.dedent(code)])).ok
        assert (await sandbox.run(["sh", "-c", "echo /proc/[0-9]*"])).stdout.split()[0] == b"/proc/1"
        assert len((await sandbox.run(["sh", "-c", "echo /proc/[0-9]*"])).stdout.split()) == 2  # process 1 and this shell
        assert running(mark) == []


async def test_namespaces_mounts_tracing_and_kernel_calls_are_refused() -> None:
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    def call(name, *args):
        ctypes.set_errno(0)
        return getattr(libc, name)(*args), ctypes.get_errno()
    print(call("unshare", 0x10000000), call("unshare", 0x00020000), call("mount", b"none", b"/tmp", b"tmpfs", 0, None), call("ptrace", 16, 1, 0, 0))
    print(call("syscall", 321, 0, None, 0), call("syscall", 425, 1, None), call("syscall", 435, None, 0), call("syscall", 56, 0x10000011, 0, 0, 0, 0))
    try: open("/proc/1/mem", "rb+")
    except OSError as error: print(type(error).__name__)
    """
    lines = (await attempt(code)).stdout.decode().splitlines()
    assert lines[0] == "(-1, 1) (-1, 1) (-1, 1) (-1, 1)"  # EPERM
    if os.uname().machine == "x86_64":
        assert lines[1] == "(-1, 1) (-1, 1) (-1, 38) (-1, 1)"  # bpf, io_uring_setup, clone3 (ENOSYS), clone(CLONE_NEWUSER)
    assert lines[2] == "PermissionError"


@pytest.mark.parametrize("path", ["/usr/bin/new", "/etc/passwd", "/new", "/dev/new", "/run/inside.py"])
async def test_nothing_but_its_own_folders_can_be_written(path: str) -> None:
    result = await attempt(f"import os\ntry: os.open({path!r}, os.O_WRONLY | os.O_CREAT)\nexcept OSError as error: print(error.errno in (1, 13, 30))")
    assert result.stdout == b"True\n"


async def test_no_file_of_the_kernels_can_be_written_but_those_of_its_own_processes() -> None:
    code = """
    import os
    for folder, folders, files in os.walk("/proc"):
        folders[:] = [name for name in folders if not name.isdigit() and name not in ("self", "thread-self")]
        for path in (os.path.join(folder, name) for name in files):
            try: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)); print(path)
            except OSError: pass
    print("end", os.path.exists("/proc/sys/kernel"))
    """
    assert (await attempt(code)).stdout == b"end False\n"


async def test_links_and_devices_lead_the_reader_nowhere() -> None:
    async with Sandbox(LIMITS) as sandbox:
        made = "ln -s /etc/passwd a; ln -s /proc/1/environ b; ln -s / c; mkfifo d; mkdir e; ln -s /workspace/f g; echo x > f; ln /workspace/f h"
        assert (await sandbox.run(["sh", "-c", made])).ok
        for path in ("a", "b", "c/etc/passwd", "../etc/passwd", "/etc/passwd", "d", "e", "g", "/dev/zero", "/proc/self/environ", "missing"):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path)
        assert await sandbox.read("h") == b"x\n"
        with pytest.raises(SandboxFileError, match="over 1"):
            await sandbox.read("f", most=1)
        with pytest.raises(SandboxFileError):
            await sandbox.write("a", b"through a link")


async def test_loops_and_sleeps_end_at_their_limit() -> None:
    assert (await attempt("import time; time.sleep(60)", SandboxLimits(wall_s=0.5))).ended == "wall"
    looping = SandboxLimits(wall_s=60.0, cpu_s=1.0, processors=2.0)
    assert (await attempt("while True: pass", looping)).ended == "cpu"
    assert (await attempt("import os\nos.fork()\nos.fork()\nwhile True: pass", looping)).ended == "cpu"
