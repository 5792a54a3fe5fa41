"""What requests took, as it goes from a worker to whoever decides by it."""

from __future__ import annotations

import pytest

from rollart.control.placement import Usage
from rollart.engines.usage import News, UsageCounts, usage_of
from rollart.types import FinishReason, GenerateResult, ServiceTime
from storage.version import Version


def result(prompt: int, cached: int, response: int, service: ServiceTime | None = None, finish: FinishReason = "stop") -> GenerateResult:
    ids = tuple(range(response))
    return GenerateResult("r", ids, (-1.0,) * response, (Version(0, 0),) * response, finish, prompt, cached, service)


def test_what_an_engine_tells_counts_without_the_time_in_its_queue() -> None:
    told = usage_of(result(100, 60, 8, ServiceTime(queue=5.0, prefill=0.5, decode=1.5)), seconds=7.5)
    assert told == Usage(1, 40, 8, 0.5, 1.5)


def test_where_an_engine_tells_nothing_all_tokens_took_alike() -> None:
    assert usage_of(result(100, 60, 10), seconds=5.0) == Usage(1, 40, 10, 4.0, 1.0)


def test_counts_arrive_as_they_were_and_start_anew() -> None:
    counts = UsageCounts(measuring=True)
    assert counts.empty
    for _ in range(3):
        counts.served("lake", "h800", "h20", result(10, 0, 2, ServiceTime(0.0, 1.0, 2.0)), 3.0)
    counts.served("lake", "h800", "h800", result(4, 0, 1, ServiceTime(0.0, 0.25, 0.0)), 3.0)
    counts.served("lake", "h800", "h20", result(10, 0, 2, finish="abort"), 3.0)  # it was served there, but not to its end
    news = News.read(counts.take())
    assert news.fallen == {("lake", "h800", "h20"): 4}
    assert news.used == {("lake", "h20"): Usage(3, 30, 6, 3.0, 6.0), ("lake", "h800"): Usage(1, 4, 1, 0.25, 0.0)}
    assert counts.empty and News.read(counts.take()) == News({}, {})


def test_nothing_is_measured_where_nobody_asks() -> None:
    counts = UsageCounts(measuring=False)
    counts.served("lake", "h20", "h20", result(10, 0, 2), 3.0)
    assert counts.empty


def test_seconds_are_read_as_sglang_spells_them() -> None:
    meta = {"e2e_latency": 4.0, "queue_time": 1.0, "decode_throughput": 5.0}
    assert ServiceTime.from_meta(meta, 11) == ServiceTime(1.0, 1.0, 2.0)
    assert ServiceTime.from_meta({"e2e_latency": 4.0, "queue_time": 1.0}, 1) == ServiceTime(1.0, 3.0, 0.0)
    assert ServiceTime.from_meta({"e2e_latency": 4.0, "queue_time": 1.0}, 2) is None
    assert ServiceTime.from_meta({"e2e_latency": 4.0}, 1) is None
    assert ServiceTime.from_meta({**meta, "decode_throughput": 2.0}, 11) == ServiceTime(1.0, pytest.approx(0.0), 5.0)  # type: ignore[arg-type]
