"""The affinity benchmark's arithmetic, and its scripted engine, whose words the placement's measurements are made of."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.affinity import ENGINES, LOADS, all_maps, draw, headline, label, profiles
from benchmarks.affinity_engine import Profile, ThrottledEngine, serving
from benchmarks.outcome import Outcome
from rollart.engines.client import EngineClient
from rollart.types import GenerateRequest, ServiceTime


def known_rows() -> list[dict]:
    """Map number i takes i + 2 seconds, twice; the chosen one, number 1, took 3.1 of its own."""
    ways = [(label(found), i + 2.0) for i, found in enumerate(all_maps(list(LOADS), list(ENGINES)))]
    chosen = ways[1][0]
    finding = [
        {"way": "finding it", "seconds": 9.0, "map": name, "round": i, "expected_s": i + 0.79}
        for i, name in enumerate([ways[0][0], ways[0][0], chosen])
    ]
    measured = [(name, seconds, name) for name, seconds in ways] + [("measured", 3.1, chosen)]
    return finding + [
        {"way": way, "seconds": seconds + noise, "map": name, "round": n, "load_1min": 1.0}
        for n, noise in enumerate((-0.1, 0.1))
        for way, seconds, name in measured
    ]


def test_the_headline_compares_medians_with_the_best_map_and_the_better_class_alone() -> None:
    found = headline(known_rows())
    assert found["share_of_best_map"] == pytest.approx(2.0 / 3.1)
    assert found["speedup_over_best_single"] == pytest.approx(2.0 / 3.1)  # the first map is h800 alone
    assert found["speedup_over_worst_map"] == pytest.approx(9.0 / 3.1)
    assert found["steps_to_find"] == 2 and found["predicted_share"] == pytest.approx(2.79 / 3.1)


def test_there_is_a_map_for_each_way_to_place_three_tasks_on_two_classes() -> None:
    maps = all_maps(list(LOADS), list(ENGINES))
    assert len(maps) == len({label(m) for m in maps}) == 8


def test_the_classes_have_the_published_proportions() -> None:
    (h800, _), (h20, _) = profiles(2.0)["h800"], profiles(2.0)["h20"]
    assert h800.prefill / h20.prefill == pytest.approx(989.5 / 148) and h20.decode / h800.decode == pytest.approx(4.0 / 3.35)
    assert profiles(2.0)["h20"][0].prefill == 2 * profiles(1.0)["h20"][0].prefill


def test_the_picture_is_drawn_from_rows(tmp_path: Path) -> None:
    rows = known_rows()
    draw(Outcome(rows, headline(rows))).savefig(tmp_path / "affinity.png")
    assert (tmp_path / "affinity.png").read_bytes().startswith(b"\x89PNG")


async def test_the_engine_takes_time_only_for_tokens_that_it_has_not_seen_and_tells_its_seconds() -> None:
    slept: list[float] = []

    async def asleep(seconds: float) -> None:
        slept.append(round(seconds, 3))

    engine = ThrottledEngine(Profile(prefill=100.0, decode=10.0, price=1.0), places=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", asleep)
        async with serving(engine) as url, EngineClient() as client:
            first = await client.generate(url, GenerateRequest("0/a/0", tuple(range(50)), 5, extra_key="0-1"))
            second = await client.generate(url, GenerateRequest("0/a/1", tuple(range(75)), 2, extra_key="0-1"))
    assert [s for s in slept if s] == [0.5, 0.5, 0.2, 0.2]  # 50 and 5 tokens; then 75 of which 55 are known, and 2
    assert (len(first.ids), first.cached_tokens, second.cached_tokens, second.prompt_tokens) == (5, 0, 55, 75)
    assert isinstance(first.service, ServiceTime) and first.finish_reason == "length" and str(first.versions[0]) == "0-1"
