"""The control side of where work goes, on a real scheduler: what it hears, decides, tells, and whom it has tried again elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker

from rollart.control.placement import EngineClass, Placement, PlacementRule
from rollart.engines.router import EngineEntry, EngineTable
from rollart.rollout import placing as module
from rollart.rollout.dispatcher import Place
from rollart.rollout.placing import ClassGone, Places, Placing, PlacingPlan
from rollart.types import Attempt, Episode
from storage.version import Version

PATIENCE_S = 20.0
V = Version(0, 0)
NAMES = {"H800": "h800", "H20": "h20", "PLAY": "player", "SPARE": "spare", "JUDGE": "judge"}
ENGINES = {"h20": EngineClass(0, 10), "h800": EngineClass(0, 10)}
BOTH = EngineTable((EngineEntry("http://a", "H800", V), EngineEntry("http://b", "H20", V)), 1)


class Fleet:
    """Keeps what it is asked to push."""

    def __init__(self) -> None:
        self.table, self.routed = BOTH, asyncio.Queue[tuple[dict[str, str], dict[str, str]]]()

    async def route(self, wanted: Mapping[str, str], probes: Mapping[str, str]) -> None:
        self.routed.put_nowait((dict(wanted), dict(probes)))


class Sent:
    """A dispatcher in whose place the tests say what is in flight."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, Place]] = Counter()
        self.waiting: dict[str, list[Attempt]] = {}
        self.failed = asyncio.Queue[tuple[list[Attempt], BaseException]]()

    def waiting_for(self, resource: str) -> list[Attempt]:
        return self.waiting.get(resource, [])

    async def fail(self, attempts: Sequence[Attempt], error: BaseException) -> None:
        self.failed.put_nowait((list(attempts), error))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Scheduler(protocol="inproc", dashboard=False) as scheduler, Client(scheduler.address, asynchronous=True) as client:
        yield client


def message(task: str, resource: str, requests: int, prefill_s: float, decode_s: float) -> dict[str, Any]:
    """What a worker tells of requests with 100 prompt and 10 response tokens each."""
    return {"fallen": [], "used": [[task, resource, requests, 100 * requests, 10 * requests, prefill_s * requests, decode_s * requests]]}


async def test_a_task_that_was_measured_elsewhere_moves_there_and_the_workers_and_the_user_are_told(client: Client) -> None:
    fleet, told = Fleet(), []
    placement = Placement({"lake": "h800"}, PlacementRule(patience=2, explore=5))
    plan = PlacingPlan("usage", NAMES, {"lake": "h800"}, ENGINES, placement)
    placing = Placing(client, fleet, plan, Places({}), list, lambda text, figures: told.append((text, figures)))  # type: ignore[arg-type]
    await placing.start()
    keeping = asyncio.create_task(placing.keep())
    async with asyncio.timeout(PATIENCE_S):
        assert await fleet.routed.get() == ({"lake": "H800"}, {})
        assert await fleet.routed.get() == ({"lake": "H800"}, {"lake": "H20"})  # it is not known there
        await client.log_event("usage", message("lake", "H800", 20, 2.0, 1.0))
        await client.log_event("usage", message("lake", "H20", 5, 0.5, 1.0))
        assert await fleet.routed.get() == ({"lake": "H800"}, {})  # now it is
        first = placing.stepped()["placement"]
        assert first["classes"] == {"lake": "h800"} and "1 of 2 times" in first["why"] and told == []
        placing._heard((0.0, message("lake", "H800", 20, 2.0, 1.0)))
        second = placing.stepped()["placement"]
        assert second["classes"] == {"lake": "h20"} and second["step_s"] < second["before_s"]
        assert await fleet.routed.get() == ({"lake": "H20"}, {})
    ((text, figures),) = told
    assert text.startswith("lake moved from h800 to h20: a step should take")
    assert (figures["kind"], figures["task"], figures["from"], figures["to"]) == ("move", "lake", "h800", "h20")
    keeping.cancel()
    placing.close()


async def test_a_task_leaves_a_class_at_once_whose_engines_are_gone(client: Client) -> None:
    fleet, told = Fleet(), []
    placement = Placement({"lake": "h800"}, PlacementRule(patience=9, explore=5))
    plan = PlacingPlan("usage", NAMES, {"lake": "h800"}, ENGINES, placement)
    placing = Placing(client, fleet, plan, Places({}), list, lambda text, figures: told.append(text))  # type: ignore[arg-type]
    for resource in ("H800", "H20"):
        placing._heard((0.0, message("lake", resource, 20, 1.0, 1.0)))
    placing.stepped()
    fleet.table = EngineTable(BOTH.entries[1:], 2)
    keeping = asyncio.create_task(placing.keep())
    async with asyncio.timeout(PATIENCE_S):
        assert await fleet.routed.get() == ({"lake": "H20"}, {})
    assert told == ["lake moved from h800 to h20: h800 has no engine any more"]
    keeping.cancel()


async def test_fallbacks_are_counted_by_step_and_told_once(client: Client) -> None:
    told, sent = [], Sent()
    places = Places({"lake": (("PLAY", "SPARE"), ("JUDGE",))}, {"PLAY"})
    plan = PlacingPlan("usage", NAMES, {"lake": "h800"}, ENGINES)
    placing = Placing(client, Fleet(), plan, places, lambda: [sent], lambda text, figures: told.append(text))  # type: ignore[arg-type]
    for count in (3, 4):
        placing._heard((0.0, {"fallen": [["lake", "H800", "H20", count]], "used": []}))
    sent.sent["lake", ("SPARE", "JUDGE")] += 6
    sent.sent["lake", ("PLAY", "JUDGE")] += 2
    assert placing.stepped() == {
        "fallbacks": [
            {"task": "lake", "stage": "environment", "wanted": "player", "used": "spare", "count": 6},
            {"task": "lake", "stage": "generate", "wanted": "h800", "used": "h20", "count": 7},
        ]
    }
    assert placing.stepped() == {}
    sent.sent["lake", ("SPARE", "JUDGE")] += 1
    assert placing.stepped()["fallbacks"][0]["count"] == 1
    assert told == [
        "h20 stands in for h800, which is full or gone, in generate of lake",
        "spare stands in for player, which is full or gone, in environment of lake",
    ]


def test_places_are_the_first_that_are_not_away_and_the_declared_where_all_are() -> None:
    places = Places({"lake": (("A", "B", "C"), ("B", "C")), "sums": (("D",), None)})
    assert places["lake"] == ("A", "B") and places["sums"] == ("D", None) and set(places) == {"lake", "sums"} and len(places) == 2
    places.away.update("AB")
    assert places["lake"] == ("C", "C") and places.declared("lake") == ("A", "B")
    places.away.update("CD")
    assert places["lake"] == ("A", "B") and places["sums"] == ("D", None)
    assert places.replaceable() == {"A": ("B", "C"), "B": ("C",)}


async def test_what_waits_for_a_class_without_a_worker_is_tried_again_where_another_stands_in(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AWAY_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    sent, stuck = Sent(), [Attempt(Episode("lake", 0), 0)]
    sent.waiting["PLAY"] = stuck
    places = Places({"lake": (("PLAY", "SPARE"), None)})
    plan = PlacingPlan("usage", NAMES, {"lake": "h800"}, ENGINES)
    placing = Placing(client, Fleet(), plan, places, lambda: [sent], lambda text, figures: None)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        async with Worker(client.scheduler.address, resources={"SPARE": 2}, dashboard=False):
            keeping = asyncio.create_task(placing.keep())
            attempts, error = await sent.failed.get()
            keeping.cancel()
            assert attempts == stuck and isinstance(error, ClassGone) and "player has no worker any more" in str(error)
            assert places["lake"] == ("SPARE", None)
            async with Worker(client.scheduler.address, resources={"PLAY": 2}, dashboard=False):
                await placing._see_workers()
                assert places["lake"] == ("PLAY", None)


async def test_a_class_that_loses_its_workers_is_noticed_while_news_of_requests_never_ceases(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    sent = Sent()
    placement = Placement({"lake": "h800"}, PlacementRule(patience=9, explore=5))
    plan = PlacingPlan("usage", NAMES, {"lake": "h800"}, ENGINES, placement)
    places = Places({"lake": (("PLAY", "SPARE"), None)})
    placing = Placing(client, Fleet(), plan, places, lambda: [sent], lambda text, figures: None)  # type: ignore[arg-type]

    async def tell() -> None:
        while True:
            placing._heard((0.0, message("lake", "H800", 1, 2.0, 1.0)))
            await asyncio.sleep(0)

    async with Worker(client.scheduler.address, resources={"SPARE": 2}, dashboard=False):
        work = [asyncio.create_task(placing.keep()), asyncio.create_task(tell())]
        async with asyncio.timeout(PATIENCE_S):
            await sent.failed.get()
        for task in work:
            task.cancel()
        assert places["lake"] == ("SPARE", None)
