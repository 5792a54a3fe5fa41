"""A sandbox as its user sees it: opened, commands one after the other, files in and out, closed; owns its process, its group and its end.

Nothing of it lies in the host's files: its folders are in memory, and its process 1 moves what goes in and out (`inside.py`). It ends when it is
closed, when its coroutine is cancelled, and with this process, however that ends: process 1 reads the end of its channel, and bubblewrap dies
with the thread that opened it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from rollart.sandbox import machine as machines
from rollart.sandbox.cgroups import Group
from rollart.sandbox.descriptors import drain, readable, sealed
from rollart.sandbox.limits import Ended, Level, SandboxFailed, SandboxFileError, SandboxLimits, SandboxMissing, SandboxResult
from rollart.sandbox.reach import Reach, pass_on
from rollart.sandbox.usage import spent, watch

START_S = 60.0
"""How long a sandbox may take to start, what it preloads included."""

ANSWER_S = 10.0
"""How long its process 1 may take for what takes it milliseconds, or to end a command."""

_turn = itertools.count()


class Sandbox:
    """`async with Sandbox(...) as sandbox: await sandbox.run([...])`. Commands run one after the other, in /workspace, which stays between
    them; what one leaves running is ended with it.

    `accept`: the weakest level that is acceptable (default: Dask's configuration, `machine.ACCEPT`). `packages`: whether Python inside has this
    process's packages. `preload`: modules that process 1 imports, for `run(code=...)`. `reach`: the one thing outside that it may talk to.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, accept: Level | None = None, packages: bool = False, preload: Sequence[str] = (),
        reach: Reach | None = None,
    ) -> None:  # fmt: skip
        self.limits = limits or SandboxLimits()
        self._accept, self._packages, self._preload, self._reach = accept, packages, list(preload), reach
        self._one_at_a_time = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._first: int | None = None  # the process descriptor of process 1
        self._pid = 0
        self._group: Group | None = None
        self._control: socket.socket | None = None
        self._passing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def closed(self) -> bool:
        """Whether it has ended, or was not opened."""
        return self._control is None

    async def open(self) -> None:
        """Starts it. SandboxMissing if this machine can't, SandboxFailed if it didn't."""
        machine = await asyncio.to_thread(machines.machine, self._accept)
        try:
            async with asyncio.timeout(START_S):
                await self._open(machine)
        except TimeoutError as error:
            await self.close()
            raise SandboxFailed(f"a sandbox was not ready within {START_S:g} s") from error
        except OSError as error:
            await self.close()
            raise SandboxFailed(f"a sandbox could not be started: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def _open(self, machine: machines.Machine) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reached, reach = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = mine
        info, said = os.pipe()
        into = {"info": said, "seccomp": sealed(machine.filter), **{name: sealed(text.encode()) for name, text in machines.FILES.items()}}
        errors = os.memfd_create("rollart-stderr")
        try:
            settings = {
                "control": theirs.fileno(), "reach": reach.fileno() if self._reach else None, "port": self._reach.port if self._reach else 0,
                "preload": self._preload, "paths": [machines.PACKAGES] if self._packages else [],
            }  # fmt: skip
            argv = machines.command(machine, self.limits, self._packages, into, json.dumps(settings))
            fds = (theirs.fileno(), reach.fileno(), *into.values())
            self._process = _started(argv, fds, errors)
            for fd in into.values():  # with the writing ends closed here, the end of what bubblewrap says can be read
                os.close(fd)
            into.clear()
            theirs.close()
            reach.close()
            mine.setblocking(False)
            await self._born(machine, info, errors)
            if self._reach is not None:
                self._passing = asyncio.create_task(pass_on(reached, self._reach))
            await self._said_ready(errors)
        finally:
            for fd in (info, errors, *into.values()):
                os.close(fd)
            theirs.close()
            reach.close()
            if self._passing is None:
                reached.close()

    async def _born(self, machine: machines.Machine, info: int, errors: int) -> None:
        """Takes hold of process 1, before it does anything that counts."""
        told = b""
        while b"}" not in told:  # bubblewrap writes it in several parts
            await readable(info)
            part = os.read(info, 4096)
            if not part:
                raise SandboxMissing(_no_sandbox(errors))
            told += part
        self._pid = int(json.loads(told)["child-pid"])
        self._first = os.pidfd_open(self._pid)
        if machine.roots is not None:
            self._group = Group(machine.roots, self.limits)
            self._group.add(self._pid)
        if self._group is None or not self._group.limits_processors:
            own, count = sorted(os.sched_getaffinity(0)), math.ceil(self.limits.processors)
            start = next(_turn) * count
            os.sched_setaffinity(self._pid, {own[(start + i) % len(own)] for i in range(count)})

    async def _said_ready(self, errors: int) -> None:
        try:
            await self._answer()
        except SandboxFailed as error:
            raise SandboxMissing(_no_sandbox(errors)) from error

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", environment: Mapping[str, str] | None = None, cwd: str = "/workspace",
        wall_s: float | None = None, code: str | None = None, passed: Sequence[int] = (),
    ) -> SandboxResult:  # fmt: skip
        """Runs a command to its end, within the limits (`wall_s`: another one than theirs), and whatever it started with it.

        `code`: Python text that a fork of process 1 runs instead, with the preloaded modules and `argv` as `sys.argv[1:]`. `passed`: descriptors
        that the command finds as 3, 4, ..., and that are closed here once it has them.

        SandboxFailed if the sandbox breaks, and is then closed. Cancelled, it closes the sandbox.
        """
        limits = self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)
        request = {
            "op": "run", "argv": list(argv), "code": code, "cwd": cwd, "environment": machines.environment(self._packages) | dict(environment or {}),
            "rlimits": self._rlimits(),
        }  # fmt: skip
        handed = list(passed)
        try:
            async with self._one_at_a_time:
                try:
                    return await self._run(request, stdin, limits, handed)
                except BaseException:
                    await self.close()
                    raise
        finally:
            while handed:
                os.close(handed.pop())

    def _rlimits(self) -> dict[str, int]:
        limits = self.limits
        found = {
            "RLIMIT_CPU": math.ceil(limits.cpu_s) + 1, "RLIMIT_FSIZE": limits.file_size, "RLIMIT_NOFILE": limits.open_files, "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": limits.processes + 1, "RLIMIT_MEMLOCK": 0, "RLIMIT_MSGQUEUE": 0,
        }  # fmt: skip
        return found if self._group is not None else found | {"RLIMIT_AS": limits.memory}

    async def _run(self, request: dict[str, Any], stdin: bytes, limits: SandboxLimits, handed: list[int]) -> SandboxResult:
        stopped: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

        def stop(why: Ended) -> None:
            if not stopped.done():
                stopped.set_result(why)

        out, err = bytearray(), bytearray()
        source, (out_read, out_write), (err_read, err_write) = sealed(stdin), os.pipe(), os.pipe()
        started, before = time.monotonic(), spent(self._group, self._pid)
        counted = (self._group.out_of_memory(), self._group.refused_processes()) if self._group else (0, 0)
        try:
            self._send(request, source, out_write, err_write, *handed)
        except BaseException:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            for fd in (source, out_write, err_write):
                os.close(fd)
            while handed:
                os.close(handed.pop())
        drains = [asyncio.create_task(drain(fd, into, limits.output, lambda: stop("output"))) for fd, into in ((out_read, out), (err_read, err))]
        watching = asyncio.create_task(watch(self._group, self._pid, before, limits, stop))
        answer = asyncio.create_task(self._answer(None))
        try:
            waiting: set[asyncio.Future[Any]] = {answer, stopped}
            await asyncio.wait(waiting, timeout=limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                stop("wall")
                with contextlib.suppress(OSError):
                    self._socket().send(b"kill")
            try:
                async with asyncio.timeout(ANSWER_S):
                    reply = (await answer)[0]
                    if "error" in reply:
                        raise SandboxFailed(f"a command could not be started: {reply['error']}")
                    await asyncio.gather(*drains)
            except (SandboxFailed, TimeoutError) as error:
                why = "memory" if self._group is not None and self._group.out_of_memory() > counted[0] else None
                if why is None:
                    raise SandboxFailed(f"a sandbox broke: {error or 'its process 1 does not answer'}") from error
                await self.close()  # the kernel ended process 1 with the rest; the command has its result, the sandbox is over
                reply = {"status": -signal.SIGKILL, "cpu_s": 0.0, "peak": limits.memory}
                stop("memory")
        finally:
            for task in (answer, watching, *drains):
                task.cancel()
            await asyncio.gather(answer, watching, *drains, return_exceptions=True)
            os.close(out_read)
            os.close(err_read)
        ended = self._how(reply, stopped.result() if stopped.done() else None, counted, limits)
        peak = (self._group.peak_memory() if self._group is not None else None) or reply["peak"]
        return SandboxResult(reply["status"], ended, bytes(out), bytes(err), time.monotonic() - started, reply["cpu_s"], peak)

    def _how(self, reply: dict[str, Any], stopped: Ended | None, counted: tuple[int, int], limits: SandboxLimits) -> Ended:
        """`counted`: what the group had counted before."""
        status = reply["status"]
        if self._group is not None and self._group.out_of_memory() > counted[0]:
            return "memory"
        if stopped is not None:
            return stopped
        if status == -signal.SIGXCPU or (status == -signal.SIGKILL and reply["cpu_s"] >= limits.cpu_s):
            return "cpu"
        if status != 0 and self._group is not None and self._group.refused_processes() > counted[1]:
            return "processes"
        return "signalled" if status < 0 else "exited"

    async def write(self, path: str, content: bytes, executable: bool = False) -> None:
        """Writes a file, its path from /workspace. SandboxFileError if it can't be, as when it is over the limits."""
        if len(content) > self.limits.disk:
            raise SandboxFileError(f"{path}: {len(content)} bytes are over limits.disk, {self.limits.disk}")
        fd = sealed(content)
        try:
            await self._ask({"op": "write", "path": path, "executable": executable}, fd)
        finally:
            os.close(fd)

    async def read(self, path: str, most: int = 1 << 20) -> bytes:
        """A file of a writable folder, its path from /workspace; links are followed inside and no further. SandboxFileError, also if it is over
        `most` bytes."""
        fds = (await self._ask({"op": "read", "path": path}))[1]
        try:
            size = os.fstat(fds[0]).st_size
            if size > most:
                raise SandboxFileError(f"{path} has {size} bytes, over {most}")
            return os.pread(fds[0], size, 0)
        finally:
            os.close(fds[0])

    async def clear(self) -> None:
        """Removes every file that commands left, for another use of the same sandbox."""
        await self._ask({"op": "clear"})

    async def _ask(self, request: dict[str, Any], *fds: int) -> tuple[dict[str, Any], list[int]]:
        async with self._one_at_a_time:
            try:
                self._send(request, *fds)
                reply, got = await self._answer()
            except BaseException:
                await self.close()
                raise
        if "error" in reply:
            raise SandboxFileError(f"{request.get('path', request['op'])}: {reply['error']}")
        return reply, got

    def _socket(self) -> socket.socket:
        if self._control is None:
            raise SandboxFailed("the sandbox is closed")
        return self._control

    def _send(self, request: dict[str, Any], *fds: int) -> None:
        message = sealed(json.dumps(request).encode())
        try:
            socket.send_fds(self._socket(), [b"request"], [message, *fds])
        except OSError as error:
            raise SandboxFailed(f"the sandbox has ended: {error}") from error
        finally:
            os.close(message)

    async def _answer(self, within_s: float | None = START_S) -> tuple[dict[str, Any], list[int]]:
        control = self._socket()
        try:
            async with asyncio.timeout(within_s):
                await readable(control.fileno())
        except TimeoutError as error:
            raise SandboxFailed(f"the sandbox did not answer within {within_s:g} s") from error
        try:
            message, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
        except OSError as error:
            raise SandboxFailed(f"the sandbox has ended: {error}") from error
        if not message:
            raise SandboxFailed("the sandbox has ended")
        return json.loads(message), fds

    async def close(self) -> None:
        """Ends it with all that is in it, and returns once nothing is left; may be called again."""
        process, first, control = self._process, self._first, self._control
        self._process = self._first = self._control = None
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
        if process is not None:
            process.kill()
        if control is not None:
            control.close()
        if self._passing is not None:
            self._passing.cancel()
        if process is None:
            return
        try:
            if first is not None:
                await readable(first)  # process 1 is only gone once all of its namespace is
        finally:
            if first is not None:
                os.close(first)
            process.wait()
            for _ in range(100):
                if self._group is None or self._group.close():
                    break
                await asyncio.sleep(0.01)  # the kernel counts what has just ended for a moment more


def _started(argv: list[str], fds: tuple[int, ...], errors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=fds, env={})


def _no_sandbox(errors: int) -> str:
    said = os.pread(errors, 2000, 0).decode(errors="replace").strip()
    return (
        f"bubblewrap makes no sandbox here ({said or 'it said nothing'}): in a container allow user namespaces and an unmasked /proc (Docker:"
        " `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`); on Ubuntu see kernel.apparmor_restrict_unprivileged_userns"
    )
