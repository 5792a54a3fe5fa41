"""Process 1 of a sandbox: starts commands, ends all that they leave, moves files in and out. Runs inside, on the standard library alone.

Nothing outside has to trust what this process says about anything but the sandbox. What runs beside it has its user id, but cannot end it (it is
process 1 of its namespace), nor read or write its memory or descriptors (it is not dumpable, and ptrace is refused).
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import stat
import sys
import time
from typing import Any

WORKSPACE, WRITABLE = "/workspace", ("/workspace", "/tmp", "/dev/shm")
PR_SET_DUMPABLE = 4


def dumpable(value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def limit(request: dict[str, Any]) -> None:
    """Of the process that will be the command, and what it starts; a hard limit can't be raised again."""
    for name, value in request["rlimits"].items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    with open("/proc/self/oom_score_adj", "w") as file:  # of the two, the kernel shall end the command and not process 1
        file.write("1000")


def start(request: dict[str, Any], fds: list[int]) -> int:
    """The process id of the command, with `fds` as its descriptors 0, 1, 2, 3 ..."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        for number in range(1, signal.NSIG):  # process 1 ignores some, and what is ignored stays so
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        dumpable(1)
        os.setsid()
        high = [os.dup2(fd, 200 + i, inheritable=False) for i, fd in enumerate(fds)]
        for number, fd in enumerate(high):
            os.dup2(fd, number, inheritable=True)
        os.closerange(len(fds), 4096)
        limit(request)
        os.chdir(request["cwd"])
        if request["code"] is None:
            os.environ.clear()
            os.environ.update(request["environment"])
            os.execvpe(request["argv"][0], request["argv"], request["environment"])
        os.environ.update(request["environment"])
        sys.argv = ["-", *request["argv"]]
        exec(compile(request["code"], "<command>", "exec"), {"__name__": "__main__"})  # noqa: S102 - what runs here is what the sandbox is for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except SystemExit as leaving:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except BaseException as error:  # noqa: BLE001 - it is a child, and has nowhere to raise to
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        os._exit(127)


def reap(main: int | None) -> tuple[int, Any] | None:
    """Waits for what has ended; the wait status and resource use of `main` if it is among that."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == main:
                found = status, usage
    return found


def end_all() -> None:
    """Nothing but process 1 is left after it."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def spent() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def write(request: dict[str, Any], content: int) -> None:
    path = os.path.join(WORKSPACE, request["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o700 if request["executable"] else 0o600)
    try:
        offset = 0
        while chunk := os.pread(content, 1 << 20, offset):
            offset += len(chunk)
            while chunk:
                chunk = chunk[os.write(fd, chunk) :]
    finally:
        os.close(fd)


def opened(path: str) -> int:
    """A descriptor of a plain file of a writable folder; links on the way there lead to the sandbox's own files at most."""
    fd = os.open(os.path.join(WORKSPACE, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_dev not in {os.stat(folder).st_dev for folder in WRITABLE}:
        os.close(fd)
        raise OSError(f"{path!r} is no plain file of the workspace")
    return fd


def empty(folder: str) -> None:
    """Removes all that is in a folder, however deep, whatever its modes."""
    os.chmod(folder, 0o1777 if folder == "/tmp" else 0o700)
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            empty(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def serve(control: socket.socket, reach: socket.socket | None, port: int) -> None:
    """Answers requests until the other end closes; process 1 ends with it, and with process 1 everything."""
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_in, False)
    os.set_blocking(wake_out, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ, "control")
    selector.register(wake_in, selectors.EVENT_READ, "child")
    if reach is not None:
        listener = socket.create_server(("127.0.0.1", port), backlog=64)
        listener.setblocking(False)
        reach.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, "reach")
    main: int | None = None
    before = 0.0

    def answer(reply: dict[str, Any], fds: list[int] | tuple[int, ...] = ()) -> None:
        socket.send_fds(control, [json.dumps(reply).encode()], fds)

    answer({"ready": True})
    while True:
        for key, _ in selector.select():
            if key.data == "reach" and reach is not None:
                with contextlib.suppress(OSError):  # a full channel refuses the connection, as a full backlog would
                    connection, _ = listener.accept()
                    with connection:
                        socket.send_fds(reach, [b"c"], [connection.fileno()])
                continue
            if key.data == "child":
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_in, 4096)
                if main is not None and (found := reap(main)) is not None:
                    main = None
                    end_all()
                    answer({"status": os.waitstatus_to_exitcode(found[0]), "cpu_s": spent() - before, "peak": found[1].ru_maxrss * 1024})
                elif main is None:
                    reap(None)
                continue
            message, fds, _, _ = socket.recv_fds(control, 64, 16)
            if not message:
                return
            if message == b"kill":
                if main is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(-1, signal.SIGKILL)
                continue
            try:
                request = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
                if request["op"] == "run":
                    before, main = spent(), start(request, fds[1:])
                elif request["op"] == "write":
                    write(request, fds[1])
                    answer({})
                elif request["op"] == "read":
                    fd = opened(request["path"])
                    answer({}, [fd])
                    os.close(fd)
                else:
                    for folder in WRITABLE:
                        empty(folder)
                    answer({})
            except (OSError, RecursionError) as error:
                answer({"error": f"{type(error).__name__}: {error}"[:2000]})
            finally:
                for fd in fds:
                    os.close(fd)


def main() -> None:
    dumpable(0)
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    reach = socket.socket(fileno=settings["reach"]) if settings["reach"] is not None else None
    kept = {control.fileno(), reach.fileno() if reach else -1}
    for fd in range(3, 256):
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
    sys.path[:0] = settings["paths"]
    started = time.monotonic()
    for module in settings["preload"]:
        importlib.import_module(module)
    if time.monotonic() - started > 0.01:
        import gc

        gc.freeze()  # children share these pages as long as nothing writes to them
    serve(control, reach, settings["port"])


if __name__ == "__main__":
    main()
