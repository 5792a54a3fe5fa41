"""What a summary says of where work went, from made-up metrics."""

from __future__ import annotations

import io

from rich.console import Console

from rollart.dashboard.summary import summarize
from rollart.dashboard.summary_table import summary_table


def fallback(count: int, task: str = "lake", stage: str = "generate") -> dict:
    return {"task": task, "stage": stage, "wanted": "h800", "used": "h20", "count": count}


LINES = [
    {"kind": "step", "step": 1, "fallbacks": [fallback(3), fallback(2, "sums")], "placement": {"classes": {"lake": "h800"}}},
    {"kind": "move", "step": 1, "task": "lake", "from": "h800", "to": "h20"},
    {"kind": "step", "step": 2, "fallbacks": [fallback(4), fallback(1, stage="environment")], "placement": {"classes": {"lake": "h20"}}},
]


def test_fallbacks_are_summed_over_the_steps_and_moves_told_with_the_map_at_the_end() -> None:
    summary = summarize(LINES, [])
    assert summary.placed.fallbacks == {
        ("lake", "generate", "h800", "h20"): 7, ("sums", "generate", "h800", "h20"): 2, ("lake", "environment", "h800", "h20"): 1,
    }  # fmt: skip
    told = summary.to_dict()["placed"]
    assert told["fallbacks"][0] == fallback(7) and told["classes"] == {"lake": "h20"}
    assert told["moves"] == [{"step": 1, "task": "lake", "from": "h800", "to": "h20"}]
    console = Console(file=io.StringIO(), width=160)
    console.print(summary_table(summary))
    text = console.file.getvalue()
    for part in ("lake generate h800 -> h20 7, sums generate h800 -> h20 2", "lake environment h800 -> h20 1", "lake h800 -> h20 at 1"):
        assert part in text


def test_a_run_in_which_nothing_went_elsewhere_says_nothing_of_it() -> None:
    summary = summarize([{"kind": "step", "step": 1}], [])
    assert summary.placed.figures() == [] and summary.to_dict()["placed"] == {"fallbacks": [], "moves": [], "classes": {}}
