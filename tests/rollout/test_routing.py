"""A worker's own view of the engines: which class an attempt wants, when one is full for it, and what it tells of both."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollart.engines.router import EngineEntry, EngineTable, Routes, StandIns
from rollart.engines.usage import News
from rollart.rollout import routing as module
from rollart.rollout.routing import PROBE_EVERY, Routing, RoutingPlan
from rollart.types import Attempt, Episode, GenerateResult, Purpose, ServiceTime
from storage.version import Version

V = Version(0, 1)
A, B = EngineEntry("http://a", "h800", V), EngineEntry("http://b", "h20", V)
TABLE = EngineTable((A, B), 1)
RESULT = GenerateResult("r", (1, 2), (-1.0, -1.0), (V, V), "stop", 10, 4, ServiceTime(9.0, 0.5, 0.25))


def attempt(index: int, member: int = 0, purpose: Purpose = "train", task: str = "lake") -> Attempt:
    return Attempt(Episode(task, index, purpose), member)


def routing(told: list[tuple[str, Any]], **plan: Any) -> Routing:
    stand_ins = {"h800": StandIns(("h20",), {"h800": 4.0})}
    return Routing(RoutingPlan(stand_ins, "usage", **plan), {"lake": "h800", "sums": "h20"}, lambda topic, message: told.append((topic, message)))


def test_a_task_goes_where_it_was_planned_to_until_newer_routes_come() -> None:
    found = routing([])
    assert found.wanted(attempt(1), TABLE) == "h800" and found.wanted(attempt(1, task="sums"), TABLE) == "h20"
    found.push(Routes({"lake": "h20", "sums": "h20"}, revision=2))
    assert found.pick(TABLE, attempt(1), found.wanted(attempt(1), TABLE)) == B
    found.push(Routes({"lake": "h800", "sums": "h20"}, revision=1))  # an older one, that came late
    assert found.wanted(attempt(1), TABLE) == "h20"


def test_one_trajectory_in_so_many_tries_the_class_that_is_to_be_measured() -> None:
    found = routing([])
    found.push(Routes({"lake": "h800", "sums": "h20"}, {"lake": "h20"}, revision=1))
    wanted = [found.wanted(attempt(i, member), TABLE) for i in range(4) for member in range(PROBE_EVERY)]
    assert wanted.count("h20") == 4 and wanted.count("h800") == 4 * (PROBE_EVERY - 1)
    assert found.wanted(attempt(0, purpose="evaluate"), TABLE) == "h800"
    assert found.wanted(attempt(0), EngineTable((A,))) == "h800"  # there is none to try


def test_what_an_engine_may_hold_is_shared_out_among_the_workers() -> None:
    found = routing([])
    found.push(Routes({"lake": "h800"}, sharers=2, revision=1))
    picked = []
    for i in range(4):
        picked.append(found.pick(TABLE, attempt(i), "h800"))
        found.in_flight[picked[-1].url] += 1
    assert picked == [A, A, A, B]  # it may be two over 4 / 2 in flight
    assert found.pick(TABLE, attempt(0), "h800") == A  # which has this one's prefix
    found.forget(attempt(0))
    assert found.pick(TABLE, attempt(0), "h800") == B


async def test_what_was_served_where_is_told_in_one_message_and_nothing_is_left_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_S", 0.0)
    told: list[tuple[str, Any]] = []
    found = routing(told, measuring=True)
    for each in (attempt(1), attempt(2), attempt(3, purpose="evaluate")):
        with found.asking(B, each, "h800") as served:
            assert found.in_flight["http://b"] == 1
            served(RESULT)
    with pytest.raises(ConnectionError), found.asking(A, attempt(4), "h800"):
        raise ConnectionError
    assert not +found.in_flight and told == []
    await asyncio.sleep(0.01)
    ((topic, message),) = told
    news = News.read(message)
    assert topic == "usage" and news.fallen == {("lake", "h800", "h20"): 3}
    assert news.used["lake", "h20"].values() == (2.0, 12.0, 4.0, 1.0, 0.5)  # of the two that are trained on


async def test_where_nobody_measures_a_request_that_was_served_where_it_wanted_costs_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_S", 0.0)
    told: list[tuple[str, Any]] = []
    found = routing(told)
    with found.asking(A, attempt(1), "h800") as served:
        served(RESULT)
    await asyncio.sleep(0.01)
    assert told == []
