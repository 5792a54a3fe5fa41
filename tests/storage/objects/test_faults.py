"""Readers and publishers behind a network and a server that fail: right data or one clear error, and what was there before stays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from storage.errors import ObjectMissing, StoreUnreachable, VersionTaken
from storage.objects import remote, retries
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.fault_proxy import FaultProxy

PASSING = ["slow down", "server error", "bad gateway", "reset", "lost reply", "reset in body", "cut body", "silence"]
READS = ("GET", "HEAD")
WRITES = ("PUT", "POST")
FOR_EVER = float("inf")
ZERO, ONE, TWO = Version(0, 0), Version(0, 1), Version(0, 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "proxied" in metafunc.fixturenames:
        metafunc.parametrize("proxied", ["s3", "gcs"] if metafunc.config.getoption("--stores") == "real" else ["s3"], indirect=True)


class Proxied:
    """A store of weights whose requests go through `proxy`; `creates` is in the URLs of its conditional requests only."""

    def __init__(self, kind: str, options: dict[str, Any], proxy: FaultProxy) -> None:
        self.proxy = proxy
        short: dict[str, Any] = {"config_kwargs": {"connect_timeout": 1, "read_timeout": 1}}
        if kind == "gcs":
            short = {"requests_timeout": aiohttp.ClientTimeout(total=None, sock_connect=1, sock_read=1)}
        self.url = f"{'s3' if kind == 's3' else 'gs'}://bucket/{time.time_ns()}"
        self.options = {**options, "endpoint_url": proxy.url, **short}
        self.creates = "/commits/" if kind == "s3" else "ifGenerationMatch=0"
        self.weights = WeightStore(self.url, self.options)
        self.objects = ObjectStore(self.url, self.options)


Proxies = Callable[[str], FaultProxy]


@pytest.fixture(scope="module")
def proxies() -> Iterator[Proxies]:
    """The proxy of a server, one for all tests: clients, which take long to make, are then the same too."""
    with ExitStack() as stack:
        yield cache(lambda server: stack.enter_context(FaultProxy(server)))


@pytest.fixture
def proxied(request: pytest.FixtureRequest, proxies: Proxies, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.001)
    options = request.getfixturevalue(request.param)
    proxy = proxies(options["endpoint_url"])
    proxied = Proxied(request.param, options, proxy)
    publish(proxied, ZERO)
    proxy.requests.clear()
    yield proxied
    proxy.heal()
    proxy.delay = 0.0


def state(version: Version) -> dict[str, torch.Tensor]:
    values = torch.from_numpy(np.random.default_rng(version.step).standard_normal((300, 500), dtype=np.float32))
    return {"a": values, "b": values[:7].to(torch.bfloat16)}


def publish(proxied: Proxied, version: Version) -> Version:
    return proxied.weights.publish(state(version), version=version).result(60)


def assert_holds(proxied: Proxied, version: Version) -> None:
    """The newest version is this one, with its own values."""
    assert proxied.weights.newest() == version
    pulled = proxied.weights.pull()
    for name, tensor in state(version).items():
        assert torch.equal(pulled[name], tensor)


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_tried_again_by_readers_and_writers_and_logged(proxied, fault, caplog):
    read = proxied.proxy.faults(fault, times=2, methods=READS)
    with caplog.at_level(logging.WARNING, "storage.objects.retries"):
        assert_holds(proxied, ZERO)
        written = proxied.proxy.faults(fault, times=2, methods=WRITES)
        publish(proxied, ONE)
    assert_holds(proxied, ONE)
    assert read.hit == written.hit == 2
    assert "attempt 2 of 6 follows in" in caplog.text and proxied.url.partition("://")[2] in caplog.text


@pytest.mark.parametrize("fault", ["slow down", "server error", "reset", "lost reply"])
def test_a_fault_that_stays_is_one_clear_error_after_bounded_tries_and_the_previous_version_stays(proxied, fault):
    proxied.proxy.faults(fault, times=FOR_EVER, part="data" if proxied.url.startswith("s3") else "upload", methods=WRITES)
    with pytest.raises(StoreUnreachable, match=r"writing .* failed: .*tried 6 times in .* try again"):
        publish(proxied, ONE)
    most = max(proxied.proxy.requests.count(request) for request in proxied.proxy.requests if request.startswith(WRITES))
    repeats = 2 if fault in {"reset", "lost reply"} else 1  # the HTTP client itself repeats at once what a kept connection swallowed
    assert most <= retries.ATTEMPTS * repeats * (1 if proxied.url.startswith("s3") else 8)  # GCS writes all objects through one address
    proxied.proxy.heal()
    assert_holds(proxied, ZERO)
    publish(proxied, ONE)
    assert_holds(proxied, ONE)


@pytest.mark.parametrize("fault", ["slow down", "reset", "reset in body"])
def test_a_reader_of_a_store_that_stays_in_trouble_gets_one_clear_error(proxied, fault):
    objects = proxied.objects
    objects.write("x", bytes(1000))
    rule = proxied.proxy.faults(fault, times=FOR_EVER, methods=READS)
    with pytest.raises(StoreUnreachable, match=r"reading .*/x failed: .*tried 6 times"):
        objects.read("x")
    assert retries.ATTEMPTS <= rule.hit <= 2 * retries.ATTEMPTS
    with pytest.raises(StoreUnreachable, match="tried 6 times"):
        proxied.weights.pull()
    proxied.proxy.heal()
    assert objects.read("x") == bytes(1000)
    assert_holds(proxied, ZERO)


def test_a_server_that_never_answers_holds_nobody_longer_than_the_time_limit(proxied, monkeypatch):
    monkeypatch.setattr(retries, "TOTAL_S", 1.5)
    rule = proxied.proxy.faults("silence", times=FOR_EVER)
    with pytest.raises(StoreUnreachable, match=r"tried 2 times"):
        proxied.objects.read("x")
    assert rule.hit == 2
    proxied.proxy.heal()
    assert_holds(proxied, ZERO)


def test_an_upload_that_the_server_stops_reading_is_given_up_and_tried_again(proxied, monkeypatch):
    monkeypatch.setattr(remote, "WRITE_S", 0.5)
    monkeypatch.setattr(remote, "SLOWEST_BYTES_PER_S", 1e7)
    large = np.random.default_rng(0).integers(0, 256, 30 << 20, dtype=np.uint8)  # more than the sockets between can hold
    rule = proxied.proxy.faults("stalled upload", methods=WRITES)
    proxied.objects.write("large", large)
    assert rule.hit == 1
    assert proxied.objects.read("large") == large.tobytes()


def test_a_full_store_is_said_at_once_and_the_previous_version_stays(proxied):
    rule = proxied.proxy.faults("full", times=FOR_EVER, methods=WRITES)
    with pytest.raises(StoreUnreachable, match="the store is full: free space"):
        publish(proxied, ONE)
    assert rule.hit <= 4  # one try of each of the writes that ran side by side
    assert_holds(proxied, ZERO)
    proxied.proxy.heal()
    publish(proxied, ONE)
    assert_holds(proxied, ONE)


def test_what_is_forbidden_is_asked_once(proxied):
    rule = proxied.proxy.faults("forbidden", times=FOR_EVER)
    for call in (lambda: proxied.objects.read("x"), lambda: proxied.objects.write("x", b""), lambda: proxied.objects.list()):
        before = rule.hit
        with pytest.raises(StoreUnreachable, match="check the credentials"):
            call()
        assert rule.hit == before + 1


def test_what_is_missing_is_asked_once(proxied):
    with pytest.raises(ObjectMissing):
        proxied.objects.read("nothing")
    assert len(proxied.proxy.requests) == 1


def test_a_commit_whose_reply_was_lost_is_ours(proxied):
    rule = proxied.proxy.faults("lost reply", methods=WRITES, part=proxied.creates)
    assert publish(proxied, ONE) == ONE
    assert rule.hit == 1
    assert_holds(proxied, ONE)
    with pytest.raises(VersionTaken):
        publish(proxied, ONE)


def test_a_creation_whose_reply_was_lost_is_told_from_one_that_another_made(proxied):
    proxied.objects.create("before", b"asked once whether the server keeps conditions")
    proxied.proxy.faults("lost reply", methods=WRITES)
    assert proxied.objects.create("x", b"equal")
    proxied.proxy.faults("lost reply", methods=WRITES)
    assert not proxied.objects.create("x", b"equal")


def test_a_lineage_whose_reply_was_lost_is_not_opened_twice(proxied):
    proxied.proxy.faults("lost reply", methods=WRITES)
    assert proxied.weights.open_lineage(ZERO) == 1
    assert proxied.weights.open_lineage(ZERO) == 2


def test_of_eight_publishers_behind_a_bad_network_one_wins_and_the_others_are_told(proxied):
    stores = [WeightStore(proxied.url, proxied.options) for _ in range(8)]
    for fault in ("lost reply", "slow down", "lost reply", "reset"):
        proxied.proxy.faults(fault, times=2, methods=WRITES)

    def attempt(number: int) -> bool:
        try:
            stores[number].publish(state(Version(0, number)), version=Version(0, 9)).result(60)
        except VersionTaken:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))
    assert won.count(True) == 1
    assert torch.equal(proxied.weights.pull(Version(0, 9))["a"], state(Version(0, won.index(True)))["a"])


def test_a_slow_store_gives_right_data(proxied):
    proxied.proxy.delay = 0.025
    publish(proxied, ONE)
    assert_holds(proxied, ONE)
