"""The real model's curve and costs, on a run whose rows and metrics are known; the run itself is `make smollm2`'s."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import real_model
from benchmarks.outcome import Outcome, Unavailable
from rollart.dashboard.summary import summarize


def member(purpose: str, episode: int, score: float | None, version: int | None) -> dict[str, Any]:
    fate = "evaluated" if purpose == "evaluate" else "trained"
    served = {"first_version": version, "last_version": version, "staleness": 0, "sampled": 4}
    return {"purpose": purpose, "task": "sums", "episode": episode, "score": score, "fate": fate, "version": version, **served}


ROWS = [
    *(member("evaluate", episode, 0.25 * (episode % 2), 0) for episode in range(4)),
    *(member("evaluate", episode, 1.0, 2) for episode in range(4)),
    *(member("train", group, float(m == 0), 0) for group in (0, 1) for m in range(2)),
    *(member("train", 2, 1.0, 1) for _ in range(2)),
    member("train", 3, None, None),  # dropped before anything scored it
]


def step(n: int) -> dict[str, Any]:
    train = {"seconds": 10.0 * n, "forwarded_tokens": 50 * n, "padding_share": 0.1 * n}
    return {"kind": "step", "step": n, "time": 100.0 + 30 * n, "train": train, "peak_memory": n * 10**9}


LINES = [
    {"kind": "start", "step": 0, "time": 100.0},
    step(1),
    step(2),
    {"kind": "intervals", "time": 170.0, "intervals": [["rollout", 100.0, 160.0], ["train", 130.0, 160.0]]},
]


def outcome() -> Outcome:
    table = pd.DataFrame(ROWS)
    summary = summarize(LINES, table)
    return Outcome(real_model.rows_of(7, summary, table), real_model.costs(LINES, summary))


def test_the_curve_holds_every_evaluation_over_episodes_and_every_batch_over_groups() -> None:
    found = {(row["what"], row["step"]): row for row in outcome().rows}
    assert {key: row["reward"] for key, row in found.items()} == {
        ("held out", 0): 0.125,
        ("held out", 2): 1.0,
        ("batches", 0): 0.5,
        ("batches", 1): 1.0,
    }
    first = found["held out", 0]
    assert (first["task"], first["seed"]) == ("sums", 7) and first["low"] < 0.125 < first["high"]


def test_costs_are_of_the_whole_run_and_of_a_step() -> None:
    costs = outcome().headline
    assert (costs["seconds"], costs["training_seconds_a_step"], costs["forwarded_tokens_a_step"]) == (70.0, 15.0, 75.0)
    assert costs["seconds_a_step"] == pytest.approx(30.0) and costs["overlap_share"] == pytest.approx(1.0)
    assert costs["padding_share"] == pytest.approx(0.15) and costs["peak_gb"] == 2.0
    assert costs["smallest_rise"] == pytest.approx(0.875) and 0 < costs["smallest_rise_low"] < 0.875


def test_the_picture_has_a_panel_a_task() -> None:
    assert [axes.get_title(loc="left") for axes in real_model.draw(outcome()).axes] == ["sums"]


def test_without_the_weights_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "PACKAGES", ("no_such_package",))
    with pytest.raises(Unavailable, match="no_such_package not installed here: `make smollm2`"):
        real_model.measure(True)
