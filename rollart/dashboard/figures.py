"""Draws a run's plots as SVG. Takes computed figures and returns text; reads no run and keeps no state (no pyplot)."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rollart.dashboard.summary import Stretch, TaskSummary
from rollart.dashboard.timeline import Span, spans_by_stage, tokens_within, union

__all__ = ["bars", "reward_curves", "stage_colour", "timeline"]

STAGE_COLOURS = {
    "rollout": "#2b6cb0", "train": "#d9572b", "publish": "#2f9e6e", "evaluate": "#7c5cbf", "warm_up": "#b7791f", "wait": "#a0aec0",
    "logprobs": "#c2a03a",
}  # fmt: skip
"""A stage keeps its colour in every plot and run."""

_SPARE_COLOURS = ("#4a5568", "#0d9488", "#be185d", "#4d7c0f")
_TRAINING_COLOUR, _MEASURED_COLOUR = "#a0aec0", "#2b6cb0"
_MOVING_STEPS = 10
_PIXELS = 1500
_RATE_BINS = 120
_STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#a0aec0", "axes.labelcolor": "#2d3748",
    "xtick.color": "#4a5568", "ytick.color": "#4a5568", "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "svg.fonttype": "path", "svg.hashsalt": "rollart", "text.parse_math": False,
}  # fmt: skip


def reward_curves(tasks: Sequence[TaskSummary], trained: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """One panel a task: evaluations with 95 % intervals, and the moving mean of the training reward, task -> (step, mean) pairs.

    All panels share both axes.
    """
    measured = {task.task: task for task in tasks}
    names = sorted({*measured, *trained})
    columns = max(min(len(names), 3), 1)
    rows = max(math.ceil(len(names) / columns), 1)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(3.5 * columns, 2.6 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, name in zip(panels, names, strict=False):
            axes.set_title(name)
            axes.grid(axis="y", color="#edf2f7")
            points = trained.get(name, ())
            if points:
                axes.plot(
                    [step for step, _ in points],
                    _moving([value for _, value in points]),
                    color=_TRAINING_COLOUR,
                    label="training, moving mean",
                )
            if name in measured:
                _evaluations(axes, measured[name])
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        for axes in panels[len(names) :]:
            axes.set_visible(False)
        for axes in panels[max(len(names) - columns, 0) : len(names)]:
            axes.set_xlabel("training steps")
            axes.tick_params(labelbottom=True)
        for axes in panels[::columns]:
            axes.set_ylabel("reward")
        if names:
            panels[0].legend(frameon=False, fontsize=8, loc="best")
        return _svg(figure)


def timeline(parts: Sequence[Stretch]) -> str:
    """A lane a stage in which it runs or does not, and the rate of sampled tokens below; time in which the run was stopped is cut out."""
    lanes: dict[str, list[Span]] = {}
    rate: list[tuple[float, float]] = []
    breaks: list[float] = []
    at = 0.0
    for part in parts:
        moments = [t for i in part.intervals for t in (i.start, i.end)] + [t for t, _ in part.samples]
        first, last = min(moments), max(moments)
        shift = at - first
        for stage, spans in spans_by_stage(part.intervals).items():
            lanes.setdefault(stage, []).extend((start + shift, end + shift) for start, end in spans)
        rate += [(moment + shift, value) for moment, value in _rate(part.samples)] + [(last + shift, math.nan)]
        at += last - first
        breaks.append(at)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10.5, 1.7 + 0.32 * len(lanes)), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[max(len(lanes), 1) * 0.32, 1.1])
        for row, (stage, spans) in enumerate(lanes.items()):
            bars = [(start, end - start) for start, end in _coarse(spans, at / _PIXELS)]
            upper.broken_barh(bars, (row - 0.36, 0.72), facecolors=stage_colour(stage, list(lanes)), linewidth=0)
        upper.set_yticks(range(len(lanes)), list(lanes))
        upper.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
        upper.tick_params(axis="y", length=0)
        lower.fill_between([t for t, _ in rate], [value for _, value in rate], color=STAGE_COLOURS["rollout"], alpha=0.25, linewidth=0)
        lower.plot([t for t, _ in rate], [value for _, value in rate], color=STAGE_COLOURS["rollout"], linewidth=1)
        lower.set_ylim(bottom=0)
        lower.set_xlim(0, at or 1)
        lower.set_ylabel("tokens / s")
        lower.set_xlabel("seconds since the start" + (" (time in which the run was stopped is cut out)" if len(parts) > 1 else ""))
        for moment in breaks[:-1]:
            for axes in (upper, lower):
                axes.axvline(moment, color="#4a5568", linestyle=":", linewidth=1)
        return _svg(figure)


def bars(values: Mapping[str, float], label: str, colours: Sequence[str] | None = None, horizontal: bool = True, digits: int = 0) -> str:
    """One bar a name with its number beside it; `label` names the number's axis."""
    names, heights = list(values), list(values.values())
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(3.5, 2.2), layout="constrained")
        axes = figure.subplots()
        if horizontal:
            drawn = axes.barh(range(len(names)), heights, color=colours or _MEASURED_COLOUR, height=0.65)
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.margins(x=0.22)
            axes.set_xlabel(label)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        else:
            drawn = axes.bar(range(len(names)), heights, color=colours or _MEASURED_COLOUR, width=0.65)
            axes.set_xticks(range(len(names)), names)
            axes.margins(x=0.3, y=0.15)
            axes.set_ylabel(label)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.bar_label(drawn, labels=[f"{height:,.{digits}f}" for height in heights], padding=3, fontsize=8)
        return _svg(figure)


def stage_colour(stage: str, stages: Sequence[str]) -> str:
    """The stage's own colour; one that has none takes a spare by its place among those of `stages` that have none."""
    if stage in STAGE_COLOURS:
        return STAGE_COLOURS[stage]
    spare = [name for name in stages if name not in STAGE_COLOURS]
    return _SPARE_COLOURS[spare.index(stage) % len(_SPARE_COLOURS)]


def _evaluations(axes: Axes, task: TaskSummary) -> None:
    steps = [e.version for e in task.evaluations]
    means = [e.estimate.mean for e in task.evaluations]
    reach = [e.estimate.high - e.estimate.mean if math.isfinite(e.estimate.high) else 0.0 for e in task.evaluations]
    axes.errorbar(steps, means, yerr=reach, color=_MEASURED_COLOUR, marker="o", markersize=4, capsize=2, linewidth=1.5, label="held-out, 95 %")


def _moving(values: Sequence[float]) -> list[float]:
    """Each value's mean with up to `_MOVING_STEPS` - 1 values before it."""
    return [sum(w) / len(w) for w in (values[max(i - _MOVING_STEPS + 1, 0) : i + 1] for i in range(len(values)))]


def _rate(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Tokens a second in even bins between the first and the last sample, at the bins' middles."""
    if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
        return []
    first, last = samples[0][0], samples[-1][0]
    width = (last - first) / min(_RATE_BINS, len(samples) - 1)
    starts = [first + i * width for i in range(min(_RATE_BINS, len(samples) - 1))]
    return [(start + width / 2, tokens_within(samples, [(start, start + width)]) / width) for start in starts]


def _coarse(spans: Iterable[Span], pixel: float) -> list[Span]:
    """Spans with gaps too small to see closed and ones too short to see widened, which bounds how many are drawn."""
    return union((start, max(end, start + pixel)) for start, end in spans)


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()
