"""`python -m rollart.engines.sglang -- ARGUMENTS`: one SGLang server, whose processes all end with this one, and this one with its owner.

Prints {"url", "pid"} on one line of stdout once the server is healthy; what the server says goes to stderr.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

import click
import psutil

from rollart.engines.embedded.process import bind, die_with_parent, ignore_interrupt
from rollart.engines.sglang.version import WrongSglang, check_version

USER_ERROR = 2
ENDED = 3
LOOK_S = 0.25
"""Between two looks at whether the server is healthy: it takes half a minute at least."""


class Stopped(Exception):
    """The owner is gone, or has sent SIGTERM."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--python", default=sys.executable, show_default=True, help="Interpreter of the environment with SGLang.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--adaptive", help="JSON of the draft lengths that the server may choose from, by batch size.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(python: str, host: str, adaptive: str | None, arguments: tuple[str, ...]) -> None:
    """Starts `PYTHON -m sglang.launch_server ARGUMENTS` at a free port of HOST and stays with it."""
    ignore_interrupt()
    signal.signal(signal.SIGTERM, _stop)
    die_with_parent(signal.SIGTERM)
    threading.Thread(target=_stop_with_stdin, name="stdin-watch", daemon=True).start()
    try:
        check_version(python)
        sys.exit(_serve(python, host, adaptive, arguments))
    except WrongSglang as error:
        click.echo(str(error), err=True)
        sys.exit(USER_ERROR)
    except Stopped:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what remains is the interpreter's own end


def _serve(python: str, host: str, adaptive: str | None, arguments: tuple[str, ...]) -> int:
    """Serves until Stopped, or until the server ends by itself, which is an error: `ENDED`."""
    with bind(host, 0) as free:
        port = free.getsockname()[1]
    command = [python, "-m", "sglang.launch_server", "--host", host, "--port", str(port), *arguments]
    with tempfile.TemporaryDirectory(prefix="sglang-") as temporary:
        if adaptive is not None:
            lengths = Path(temporary) / "draft-lengths.json"
            lengths.write_text(adaptive)
            command += ["--speculative-adaptive", "--speculative-adaptive-config", str(lengths)]
        return _watch(command, host, port, {**os.environ, "TMPDIR": temporary})


def _watch(command: list[str], host: str, port: int, environment: dict[str, str]) -> int:
    # A group of its own, so that all processes of the server can be killed at once. Should this one be killed without a chance to do so, the
    # server's first process dies with it, and SGLang has each further one die with its parent.
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, process_group=0, preexec_fn=die_with_parent
    )  # fmt: skip
    left: list[Path] = []
    try:
        while server.poll() is None:
            if _healthy(host, port):
                left = _shared_memory(server.pid)
                name = f"[{host}]" if ":" in host else host
                print(json.dumps({"url": f"http://{name}:{port}", "pid": server.pid}), flush=True)
                break
            time.sleep(LOOK_S)
        server.wait()
        return ENDED
    finally:
        _kill(server)
        for path in left:
            path.unlink(missing_ok=True)


def _healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _shared_memory(pid: int) -> list[Path]:
    """The files in shared memory that the server's processes have made; SGLang leaves them, some KiB a server, when it is killed."""
    found: set[str] = set()
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(OSError):  # no such file where there is no /proc, nor when the process is gone
            found |= set(re.findall(r"/dev/shm/sgl\S+", Path(f"/proc/{process.pid}/maps").read_text()))
    return [Path(name) for name in sorted(found)]


def _kill(server: subprocess.Popen[bytes]) -> None:
    """Ends all processes of the server, at once: nothing in them is worth saving, and their own way out waits for requests."""
    with contextlib.suppress(ProcessLookupError):  # the group is its processes, and they may be gone
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough, and a second one would break the ending off
    raise Stopped


def _stop_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
