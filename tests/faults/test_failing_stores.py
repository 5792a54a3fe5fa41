"""A run's store that fails for a while, fails for good, or is full: the run goes on, or ends in one line and is resumed by the same command."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from rollart.dashboard.metrics import read_metrics
from rollart.journal import Journal
from rollart.rollout.tables import score_table
from storage.objects.store import ObjectStore
from tests.conftest import Place
from tests.storage.fault_proxy import FaultProxy

ENDLESS = ("train.steps=100000", "evaluate.every=0", "evaluate.episodes=4")

pytestmark = pytest.mark.timeout(500)


def assert_whole(url: str, steps: int, options: dict[str, Any] | None = None) -> None:
    """Each step counts once, no member is trained on twice, and what the ledger says was trained on has its score."""
    store = ObjectStore(url, options)
    counted = Journal(store).batches()
    assert [b.step for b in counted] == list(range(steps))
    assert [line["step"] for line in read_metrics(url, options) if line["kind"] == "step"] == list(range(1, steps + 1))
    nonces = [nonce for batch in counted for _, nonce, fate in batch.fates if fate in ("trained", "no_signal")]
    table = score_table(url, options)
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(["task", "episode", "member"]).any()
    assert sorted(trained["nonce"]) == sorted(nonces) and len(nonces) == steps * (4 * 4 + 2 * 3)


def assert_ended_in_one_line(running: Any, why: str) -> None:
    assert running.wait() == 3, running.heard
    assert running.left(20.0) == []
    (said,) = [line for line in running.heard.splitlines() if line.startswith("rollart: ")]
    assert why in said and "Traceback" not in running.heard


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """In front of an S3 server with the bucket `bucket`, to which the environment has the key."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret-value")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    fsspec.filesystem("s3", endpoint_url=f"http://{host}:{port}").mkdir("bucket")
    with FaultProxy(f"http://{host}:{port}") as proxy:
        yield proxy
    server.stop()


@pytest.mark.slow
def test_a_store_that_fails_for_seconds_costs_time_and_one_that_goes_on_failing_ends_the_run_which_can_be_resumed(
    tmp_path: Path, proxied: FaultProxy
) -> None:
    place, url, options = Place(tmp_path), "s3://bucket/runs/s3", {"endpoint_url": proxied.url}
    where = ("run.root=s3://bucket/runs", f"run.storage_options.endpoint_url={proxied.url}")
    running = place.start("s3", *where, *ENDLESS)
    try:
        running.says("training step 2/")
        before = Journal(ObjectStore(url, options)).steps()
        failing = proxied.faults("server error", float("inf"))
        _until(lambda: failing.hit >= 3)
        time.sleep(2.0)  # for that long; the storage layer's tries span six
        proxied.heal()
        _until(lambda: Journal(ObjectStore(url, options)).steps() >= before + 3)
        assert running.process.poll() is None
        proxied.faults("server error", float("inf"))
        assert_ended_in_one_line(running, "tried 6 times in")
        proxied.heal()
        steps = Journal(ObjectStore(url, options)).steps() + 2
        resumed = place.start("s3", *where, f"train.steps={steps}", *ENDLESS[1:], resume=True)
        assert resumed.wait() == 0, resumed.heard
        assert resumed.left() == []
    finally:
        for each in place.started:
            each.kill_all()
    assert_whole(url, steps, options)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("nothing may be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_run_whose_store_is_full_says_so_and_goes_on_once_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    place = Place(tmp_path)
    (tmp_path / "runs").symlink_to(small_disk)
    running = place.start("full", *ENDLESS)
    try:
        running.says("training step 2/")
        with (small_disk / "filler").open("wb", buffering=0) as filler:
            _fill(filler)
        assert_ended_in_one_line(running, "No space left on device")
        (small_disk / "filler").unlink()
        steps = place.journal("full").steps() + 2
        resumed = place.start("full", f"train.steps={steps}", *ENDLESS[1:], resume=True)
        assert resumed.wait() == 0, resumed.heard
        assert resumed.left() == []
        assert_whole(str(place.run("full").resolve()), steps)
    finally:
        for each in place.started:
            each.kill_all()


def _fill(file: Any) -> None:
    """Writes until there is no room."""
    size = 1 << 20
    while size:
        try:
            file.write(b"x" * size)
        except OSError:
            size //= 2


def _until(there: Any) -> None:
    deadline = time.monotonic() + 300
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.1)  # another process does it
