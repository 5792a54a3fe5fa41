"""A run with engines of two hardware classes, which finds out by itself where its tasks should generate."""

from __future__ import annotations

from typing import Any

import pytest

STEPS = 30
TASKS = ("guess_number", "chain_sum")
PRICED = (
    "hardware.engine.price_per_hour=100", "hardware.other={resource: OTHER, price_per_hour: 0.01}", f"train.steps={STEPS}",
    "train.checkpoint_every=100", "placement={rule: measured, classes: [other], explore: 2, patience: 2, price_weight: 1}",
    "evaluate.every=0", "evaluate.episodes=6",
)  # fmt: skip

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_tasks_are_tried_at_both_classes_and_move_to_the_one_that_costs_a_hundredth_of_a_percent(place: Any) -> None:
    running = place.finish("placed", *PRICED)
    maps = [line["placement"]["classes"] for line in place.metrics("placed", "step")]
    assert len(maps) == STEPS and maps[0] == dict.fromkeys(TASKS, "engine") and maps[-1] == dict.fromkeys(TASKS, "other")
    moves = place.metrics("placed", "move")
    assert sorted((m["task"], m["from"], m["to"]) for m in moves) == sorted((task, "engine", "other") for task in TASKS)
    assert all(m["step_s"] > 0 and m["before_s"] > 0 for m in moves)
    for task in TASKS:
        assert running.heard.count(f"{task} moved from engine to other: a step should take") == 1
    assert "engines by task" in running.printed and "moves" in running.printed
    assert not any("fallbacks" in line for line in place.metrics("placed", "step"))  # what was tried or moved was wanted there
    assert [line["step"] for line in place.metrics("placed", "step")] == list(range(1, STEPS + 1))


def test_a_class_that_is_full_lets_another_serve_and_the_run_says_how_often(place: Any) -> None:
    full = ("engine.slots=8", "hardware.engine={queue: 0, fallback: other, resource: GENERATE}", "hardware.other={resource: OTHER}")
    running = place.finish("full", *full, "train.steps=24", "train.max_skipped=24", "evaluate.every=0", "evaluate.episodes=6")
    entries = [entry for line in place.metrics("full", "step") for entry in line.get("fallbacks", ())]
    assert {(e["stage"], e["wanted"], e["used"]) for e in entries} == {("generate", "engine", "other")}
    assert {e["task"] for e in entries} <= set(TASKS) and sum(e["count"] for e in entries) > 10
    assert "other stands in for engine, which is full or gone, in generate of" in running.heard
    assert "served by a stand-in" in running.printed
