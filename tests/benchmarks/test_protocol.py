"""The protocol's benchmark in small: both sides answer whole, and its figures come of both processes."""

from __future__ import annotations

import pytest

from benchmarks import protocol


async def test_both_servers_answer_every_request_whole_and_cost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CASES", ((1, 100), (8, 400)))
    monkeypatch.setattr(protocol, "STREAMS", (4, 12))
    rows = await protocol.rows(quick=True)
    assert {(r["way"], r["in_flight"], r["streamed"]) for r in rows} == {(w, *k) for w in protocol.WAYS for k in ((1, False), (8, False), (4, True))}
    assert all(r["client_cpu_ms"] > 0 and r["server_cpu_ms"] > 0 and r["requests_a_second"] > 0 for r in rows)
    figures = protocol.headline(rows)
    assert figures["cpu_ms_8"] > 0 and "stream_cpu_over_floor" in figures


async def test_an_answer_that_is_not_whole_is_an_error() -> None:
    async def short(number: int, stream: bool) -> int:
        return 63

    with pytest.raises(ExceptionGroup) as found:
        await protocol.crowd(short, 2, 4, False)
    assert "an answer has 63 tokens of 64" in str(found.value.exceptions[0])
