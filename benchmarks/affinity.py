"""What it is worth to let each task generate where it suits, and how near to the best map of tasks to classes the measured placement comes.

Two hardware classes as RollArt's (arXiv 2512.22560): H800, strong in compute, at 2.85 times the price of H20, strong in bandwidth; 2 of the one
cost about as much as 6 of the other. An engine's place prefills in proportion to its bf16 TFLOP/s (989.5 and 148) and decodes in proportion to
its TB/s (3.35 and 4.0). Engines wait and compute nothing; router, client, plugins, dispatcher and placement are a run's own. Every map of three
tasks to the classes is measured in turns with the map that the placement chose, which began on the dearer class alone and knew nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks.affinity_bed import Bed, Load, all_maps, bed
from benchmarks.affinity_engine import Profile
from benchmarks.outcome import Benchmark, Outcome
from rollart.control.placement import Placement, PlacementRule

PREFILL, DECODE = 5.0, 25.0
"""Tokens a second for each TFLOP/s and for each TB/s, of one place: so slow that the seconds of this machine's cores hardly count."""

ENGINES, PLACES = {"h800": 2, "h20": 6}, 2
LOADS = {"frozen_lake": Load(16, 3, 600, 8), "math": Load(32, 1, 30, 100), "shop": Load(16, 2, 200, 30)}
RULE = PlacementRule(patience=2, explore=6)
CHOSEN = "measured"
MOST_STEPS = 12
"""Steps after which the placement should have settled."""


def profiles(pace: float) -> dict[str, tuple[Profile, int]]:
    """The classes, `pace` times as fast."""
    published = {"h800": (989.5, 3.35, 2.85), "h20": (148.0, 4.0, 1.0)}
    return {
        name: (Profile(pace * PREFILL * compute, pace * DECODE * bandwidth, price), ENGINES[name])
        for name, (compute, bandwidth, price) in published.items()
    }


def label(classes: Mapping[str, str]) -> str:
    """Such as `frozen_lake h800, math h20, shop h20`."""
    return ", ".join(f"{task} {name}" for task, name in classes.items())


async def settle(used: Bed) -> list[dict[str, Any]]:
    """Lets the placement measure and decide, step by step, until it has nothing left to try and sees no better map; a row a step."""
    rows: list[dict[str, Any]] = []
    keeping = asyncio.create_task(used.placing.keep())
    while len(rows) < MOST_STEPS:
        before = label(used.placement.classes)
        seconds = await used.step()
        decided = used.placing.stepped()["placement"]
        expected = decided["before_s"] or decided["step_s"]
        rows.append({"way": "finding it", "seconds": seconds, "map": before, "round": len(rows), "expected_s": expected, "why": decided["why"]})
        if decided["why"] == "no map is better" and not decided["explore"]:
            break
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    return rows


async def compare(rounds: int, pace: float) -> Outcome:
    """The placement's own steps, then all maps and the chosen one in turns."""
    placement = Placement(dict.fromkeys(LOADS, "h800"), RULE)
    async with bed(LOADS, profiles(pace), PLACES, placement) as used:
        rows = await settle(used)
        chosen = dict(placement.classes)
        for number in range(rounds):
            ways = [(label(found), found) for found in all_maps(list(LOADS), list(ENGINES))]
            for way, found in [*ways, (CHOSEN, chosen)]:
                await used.fleet.route(found, {})
                seconds = await used.step()
                load = round(psutil.getloadavg()[0], 2)
                rows.append({"way": way, "seconds": seconds, "map": label(found), "round": number, "load_1min": load})
    return Outcome(rows, headline(rows))


def typical(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Each way's median seconds, but those of the steps in which the placement was found."""
    ways = dict.fromkeys(row["way"] for row in rows if "load_1min" in row)
    return {way: median(row["seconds"] for row in rows if row["way"] == way) for way in ways}


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`share_of_best_map`: the best map's seconds over the chosen one's. `speedup_over_best_single`: those of the better class alone over the
    chosen map's. `steps_to_find`: until the placement was on the map that it chose. `predicted_share`: the seconds that the placement expected of
    it over the measured ones."""
    seconds = typical(rows)
    chosen = seconds.pop(CHOSEN)
    single = min(seconds[label(dict.fromkeys(LOADS, name))] for name in ENGINES)
    last = next(row["map"] for row in rows if row["way"] == CHOSEN)
    finding = [row["map"] for row in rows if row["way"] == "finding it"]
    expected = next((row["expected_s"] for row in reversed(rows) if row["way"] == "finding it"), None)
    return {
        "share_of_best_map": min(seconds.values()) / chosen,
        "speedup_over_best_single": single / chosen,
        "speedup_over_worst_map": max(seconds.values()) / chosen,
        "steps_to_find": float(finding.index(last) if last in finding else len(finding)),
        **({"predicted_share": expected / chosen} if expected else {}),
    }


def measure(quick: bool) -> Outcome:
    """Under four minutes; quick: one round of all maps, a little faster."""
    return asyncio.run(compare(1, 2.0) if quick else compare(2, 1.5))


def draw(outcome: Outcome) -> Figure:
    """Seconds a step of every map, the chosen one's own measurement set off."""
    seconds = typical(outcome.rows)
    order = sorted(seconds, key=lambda way: seconds[way])
    chosen = next(row["map"] for row in outcome.rows if row["way"] == CHOSEN)
    names = [f"{CHOSEN}: {chosen}" if way == CHOSEN else way for way in order]
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(names, [seconds[way] for way in order], color=["#d9572b" if way == CHOSEN else "#2b6cb0" for way in order], height=0.65)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.set_xlabel("seconds a step")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))
    return figure


BENCHMARK = Benchmark("affinity", "Each task's generation on the hardware class that suits it, found out by measuring", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
