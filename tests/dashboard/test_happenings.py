"""Failures by cause and what happened around a run, from its metrics to its report."""

from __future__ import annotations

from typing import Any

from rollart.dashboard.happenings import Happening, failures, happenings
from rollart.dashboard.report import render_report
from rollart.dashboard.summary import summarize
from rollart.dashboard.summary_table import figures


def step(number: int, **ends: int) -> dict[str, Any]:
    return {"kind": "step", "step": number, "ends": {"scored": 9, **{f"failed:{cause}": n for cause, n in ends.items()}}}


def test_failures_are_those_of_the_last_step_which_counts_over_the_resumes_of_a_run() -> None:
    lines = [{"kind": "start"}, step(1, environment=2), {"kind": "resume"}, step(2, environment=3, machine=1), step(3, reward=6, environment=4)]
    assert failures(lines) == {"reward": 6, "environment": 4}
    assert failures([*lines, {"kind": "resume"}, {"kind": "end"}]) == {"reward": 6, "environment": 4}
    assert failures([{"kind": "start"}, step(1)]) == {}


def test_what_was_told_is_kept_in_its_order_and_nothing_else() -> None:
    told = [{"kind": k, "time": t, "text": f"{k} at {t}"} for t, k in ((1.0, "silence"), (2.0, "told"), (3.0, "workers"))]
    assert happenings([*told, {"kind": "end", "time": 4.0}, {"kind": "step", "step": 1, "text": "x", "time": 5.0}]) == (
        Happening(1.0, "silence at 1.0"), Happening(2.0, "told at 2.0"), Happening(3.0, "workers at 3.0"),
    )  # fmt: skip


def test_summary_and_report_tell_both(made_up: Any) -> None:
    lines = [*made_up.lines(), step(61, reward=2), {"kind": "told", "time": 0.0, "text": "worker <player-0> leaves"}]
    summary = summarize(lines, made_up.rows())
    assert dict(figures(summary))["failed attempts by cause"] == "reward 2"
    assert summary.to_dict()["failures"] == {"reward": 2}
    assert summary.to_dict()["happenings"] == [{"time": 0.0, "text": "worker <player-0> leaves"}]
    page = render_report("runs/x", summary, [], {})
    assert "What happened around it" in page and "1970-01-01 00:00:00  worker &lt;player-0&gt; leaves" in page
    assert "What happened around it" not in render_report("runs/x", summarize(made_up.lines(), made_up.rows()), [], {})
