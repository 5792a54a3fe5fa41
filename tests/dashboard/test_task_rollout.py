"""Trajectories by task, from the lines of the steps."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rollart.dashboard.summary import summarize
from rollart.dashboard.summary_table import summary_table
from rollart.dashboard.task_rollout import task_rollouts


def tally(members: int, played: int, sampled: int) -> dict[str, Any]:
    return {"members": members, "played": played, "sampled": sampled, "seconds": float(played)}


LINES = [
    {"kind": "step", "step": 1, "groups": {"lake": 3, "sums": 1}, "waited": {"lake": 0.5}, "by_task": {"lake": {}, "sums": {}}},
    {"kind": "evaluation", "step": 1},
    {
        "kind": "step", "step": 2, "groups": {"lake": 2, "sums": 2}, "waited": {"lake": 0.25, "sums": 4.0},
        "by_task": {
            "lake": {"trained": tally(40, 40, 800)},
            "sums": {
                "trained": tally(24, 24, 96), "failed": tally(2, 0, 0), "over_age": tally(8, 4, 36), "spare": {**tally(1, 0, 0), "outlasted": 6},
            },
        },
    },
]  # fmt: skip


def test_shares_and_waits_are_of_all_steps_and_tallies_of_the_last() -> None:
    lake, sums = task_rollouts(LINES)
    assert (lake.task, lake.share, lake.waited, dict(lake.dropped)) == ("lake", 0.625, 0.75, {})
    assert (sums.task, sums.share, sums.waited) == ("sums", 0.375, 4.0)
    assert [(fate, t.members, t.mean_sampled) for fate, t in sums.dropped.items()] == [("over_age", 8, 9.0), ("failed", 2, None), ("spare", 1, None)]
    assert sums.to_dict()["fates"]["trained"]["mean_sampled"] == 4.0


def test_a_run_without_steps_has_none() -> None:
    assert task_rollouts([{"kind": "start"}]) == ()


@pytest.mark.parametrize("words", ["sums", "4.0 s", "24 (4.0)", "over_age 8 (9.0)", "failed 2", "spare 1 (at least", "6.0)"])
def test_the_table_that_ends_a_run_shows_what_was_dropped_beside_what_was_trained_on(words: str) -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(summary_table(summarize([{**line, "tokens": 0} for line in LINES], [])))
    assert words in text.getvalue()
