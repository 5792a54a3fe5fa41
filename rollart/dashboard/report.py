"""Writes a run's report: one HTML file that needs nothing else to be read.

Owns its words and what is safe to show; plots are drawn by `figures`, numbers come from `summary`.

What a model wrote is hostile text here: it is escaped, its control characters are made visible, plots are images (so that no markup in
them is live), and the page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import base64
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import jinja2

from rollart.dashboard import figures
from rollart.dashboard.metrics import read_metrics
from rollart.dashboard.summary import Rows, Stretch, Summary, stretches, summarize
from rollart.dashboard.summary_table import figures as single_figures
from rollart.dashboard.summary_table import interval, percent
from storage.objects.store import ObjectStore

__all__ = ["Sample", "render_report", "visible", "write_report"]

MOST_HAPPENINGS = 50
"""What happened around the run is shown from the last so many on: one that went badly for days tells of thousands."""

SAMPLE_CHARACTERS = 4000
"""How much of one piece of a sampled trajectory is shown: a report has to open quickly, and the whole text is in the run's folder."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory to show: `name` (purpose/task/episode/member/attempt), version of its first token, and its pieces in order.

    A piece is what was put before the policy (`prompt`) or what it answered (`response`), as decoded text.
    """

    name: str
    task: str
    version: int
    score: float | None
    outcome: str
    pieces: tuple[tuple[Literal["prompt", "response"], str], ...]
    fate: str = ""


def write_report(run_url: str, storage_options: Mapping[str, Any] | None, table: Rows, samples: Sequence[Sample] = ()) -> str:
    """Writes `report.html` into the run's folder and returns its URL; an earlier one is replaced.

    `table` holds the run's trajectories as `summary.ScoreTable` describes. Raises `MetricsError` for broken metrics, and what the
    store raises.
    """
    lines = read_metrics(run_url, storage_options)
    page = render_report(run_url, summarize(lines, table), stretches(lines), training_rewards(lines), samples)
    ObjectStore(run_url, storage_options).write("report.html", page.encode())
    return f"{run_url.rstrip('/')}/report.html"


def render_report(
    run_url: str,
    summary: Summary,
    parts: Sequence[Stretch],
    trained: Mapping[str, Sequence[tuple[int, float]]],
    samples: Sequence[Sample] = (),
) -> str:
    """The page as text; `trained` is each task's mean training reward as (step, mean) pairs."""
    stages = list(summary.usage.stages)
    plots = {
        "reward": figures.reward_curves(summary.tasks, trained) if summary.tasks or trained else None,
        "timeline": figures.timeline(parts) if parts else None,
        "stages": figures.bars(summary.usage.stages, "seconds", [figures.stage_colour(s, stages) for s in stages], digits=1) if stages else None,
        "fates": figures.bars(summary.fates, "trajectories") if summary.fates else None,
        "staleness": figures.bars({str(k): v for k, v in summary.staleness.items()}, "trained trajectories", horizontal=False)
        if summary.staleness
        else None,
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rollart.dashboard", package_path=""), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"visible": visible, "interval": interval, "percent": percent, "shorten": _shorten, "moment": _moment}
    return environment.get_template("report.html").render(
        run=run_url.rstrip("/").rsplit("/", 1)[-1],
        url=run_url,
        summary=summary,
        figures=single_figures(summary),
        plots={name: _data_uri(svg) if svg is not None else None for name, svg in plots.items()},
        samples=samples,
        most_happenings=MOST_HAPPENINGS,
    )


def training_rewards(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Each task's mean training reward as (step, mean) pairs; steps in which a task had no group are left out."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        if line.get("kind") == "step":
            for task, value in line.get("reward", {}).items():
                if value is not None:
                    found[task].append((line["step"], value))
    return dict(found)


def visible(text: str) -> str:
    """`text` with every character that would not show, or would reorder what follows it, spelled as `\\u....`; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else f"\\u{ord(c):04x}" for c in text)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _shorten(text: str) -> str:
    left_out = len(text) - SAMPLE_CHARACTERS
    return text if left_out <= 0 else f"{text[:SAMPLE_CHARACTERS]}\n[{left_out:,} more characters]"


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
