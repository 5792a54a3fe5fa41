"""Draws a run's summary for a terminal. Computes nothing: every figure comes from `Summary`."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollart.control.tallies import Tally
from rollart.dashboard.corrections import Agreement, Correction
from rollart.dashboard.estimates import Estimate
from rollart.dashboard.summary import Summary

__all__ = ["figures", "interval", "percent", "summary_table"]


def summary_table(summary: Summary) -> RenderableType:
    """The table that ends a run; fits 80 columns."""
    reward = _table("Reward on held-out episodes: mean, and its 95 % interval below", ("task", "before", "after", "rise", "best"))
    for task in summary.tasks:
        rise = f"{_below(task.rise, signed=True)}\n{task.rise.method}" if task.rise else "-"
        reward.add_row(
            Text(f"{task.task}\nn = {task.after.estimate.n}"), _below(task.before.estimate), _below(task.after.estimate), rise,
            f"{task.best.estimate.mean:.3f} at {task.best.version}\nfinal/best {_decimal(task.final_over_best)}",
        )  # fmt: skip
    stages = _table("Time by stage", ("stage", "seconds", "share of the run"))
    for stage, seconds in summary.usage.stages.items():
        stages.add_row(Text(stage), f"{seconds:,.1f}", percent(summary.usage.shares[stage]))
    rollout = _table("Trajectories by task (and their sampled tokens on average)", ("task", "share of groups", "waited for", "trained on", "dropped"))
    for found in summary.rollout:
        dropped = "\n".join(f"{fate} {_tally(tally)}" for fate, tally in found.dropped.items()) or "none"
        trained = found.fates.get("trained")
        rollout.add_row(Text(found.task), percent(found.share), f"{found.waited:,.1f} s", _tally(trained) if trained else "none", dropped)
    facts = Table.grid(padding=(0, 2))
    for name, value in figures(summary):
        facts.add_row(Text(name, style="dim"), Text(value))
    return Group(reward, *([rollout] if summary.rollout else []), stages, facts)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        first = name == columns[0]
        table.add_column(name, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    return table


def _below(estimate: Estimate, signed: bool = False) -> str:
    sign = "+" if signed else ""
    bounds = f"[{estimate.low:{sign}.2f}, {estimate.high:{sign}.2f}]" if math.isfinite(estimate.low) else ""
    return f"{estimate.mean:{sign}.3f}\n{bounds}"


def figures(summary: Summary) -> list[tuple[str, str]]:
    """The single figures as (name, text), in reading order."""
    use = summary.usage
    total = sum(summary.fates.values())
    return [
        ("training steps", str(summary.steps)),
        (
            "trajectories by fate",
            ", ".join(f"{fate} {count}" for fate, count in summary.fates.items()) + f" (of {total})" if total else "none",
        ),
        ("failed attempts by cause", ", ".join(f"{cause} {count}" for cause, count in summary.failures.items()) or "none"),
        ("staleness of trained ones", ", ".join(f"{age}: {count}" for age, count in summary.staleness.items()) or "none"),
        *((f"behaviour weights, staleness {age}", _correction(found)) for age, found in summary.corrections.items()),
        ("trainer against engine", _agreement(summary.agreement)),
        ("training time with rollout", percent(use.overlap_share)),
        ("trainer idle", percent(use.trainer_idle_share)),
        (
            "rollout tokens a second",
            f"{_count(use.rate_while_training)} while training, {_count(use.rate_while_idle)} while idle, ratio {_decimal(use.rate_ratio)}",
        ),
        *summary.placed.figures(),
        ("tokens sampled", f"{summary.tokens_generated:,.0f}"),
        ("peak memory", "not measured" if summary.peak_memory is None else f"{summary.peak_memory / 1e9:.2f} GB"),
    ]


def _tally(tally: Tally) -> str:
    if tally.mean_sampled is not None:
        return f"{tally.members:,} ({tally.mean_sampled:,.1f})"
    return f"{tally.members:,}" if tally.least_sampled is None else f"{tally.members:,} (at least {tally.least_sampled:,.1f})"


def _correction(found: Correction) -> str:
    shares = "".join(f", {name} {share:.1%}" for name, share in found.shares.items())
    top = "-" if found.highest is None else f"{found.highest:.2f}"
    return f"mean {found.weight:.3f}, 99 % of a step's under {top}, effective samples {percent(found.effective)}{shares}"


def _agreement(found: Agreement | None) -> str:
    if found is None:
        return "no token of the trainer's own version"
    alarms = f", {found.alarms} steps alarmed" if found.alarms else ""
    return f"{found.mean:.2g} nats apart on average, {found.highest:.2g} at most{alarms}"


def interval(estimate: Estimate, signed: bool = False) -> str:
    """`0.512 [0.443, 0.581]`, or the mean alone where one episode gives no interval."""
    sign = "+" if signed else ""
    if not math.isfinite(estimate.low):
        return f"{estimate.mean:{sign}.3f}"
    return f"{estimate.mean:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
