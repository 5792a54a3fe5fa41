"""Shows a run's progress: a live panel on a terminal, one line a step in a log file. Owns no state of the run and starts no thread."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Literal, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollart.dashboard.status import RunStatus

__all__ = ["Mode", "Progress", "plain_line", "render"]

Mode = Literal["auto", "live", "plain", "quiet"]
"""`auto` is `live` on a terminal and `plain` elsewhere."""

_BAR_WIDTH = 24
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Progress:
    """A context manager that draws each snapshot given to `update`.

    Live drawing happens only within `update`, so a stalled run shows its last snapshot rather than a clock that moves. What other
    code prints while the panel is up appears above it.
    """

    def __init__(self, mode: Mode = "auto", stream: TextIO | None = None) -> None:
        self._console = Console(file=stream if stream is not None else sys.stderr)
        self.mode: Mode = ("live" if self._console.is_terminal else "plain") if mode == "auto" else mode
        self._live = Live(console=self._console, auto_refresh=False, transient=False) if self.mode == "live" else None
        self._last: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: RunStatus) -> None:
        """Draws `status`; in plain mode only if the step or the phase is another than last time."""
        if self._live is not None:
            self._live.update(render(status), refresh=True)
        elif self.mode == "plain" and self._last != (status.phase, status.step):
            if status.dashboard and self._last is None:
                self._write(f"Dask dashboard: {status.dashboard}")
            self._last = (status.phase, status.step)
            self._write(plain_line(status))

    def note(self, text: str) -> None:
        """Prints a line of its own, above the panel if there is one; nothing in quiet mode."""
        if self.mode != "quiet":
            self._write(text)

    def _write(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def plain_line(status: RunStatus) -> str:
    """One line for a log file, in the order that a reader looks: where it is, how good it is, what it costs, what is wrong."""
    parts = [
        f"{_clock(status.seconds)} {status.phase} step {status.step}/{status.steps} version {status.version}",
        "reward " + (" ".join(f"{task}={value:.3f}" for task, value in sorted(status.reward.items())) or "-"),
        f"in flight {status.in_flight}",
        f"finished {status.finished}",
        f"dropped {status.dropped}{_reasons(status)}",
        "staleness " + (" ".join(f"{age}:{count}" for age, count in sorted(status.staleness.items())) or "-"),
        f"{status.tokens_per_second:,.0f} tokens/s",
    ]
    if status.awaited:
        parts.append(f"waiting for {status.awaited}")
    return " | ".join(parts)


def render(status: RunStatus) -> RenderableType:
    """The live panel. Task names and what is awaited are shown as they are, never read as markup."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    bar = ProgressBar(total=max(status.steps, 1), completed=status.step, width=_BAR_WIDTH)
    steps = Table.grid(padding=(0, 1))
    steps.add_row(bar, Text(f"{status.step}/{status.steps}"))
    facts.add_row("step", steps)
    facts.add_row("version", Text(status.version))
    facts.add_row("trajectories", Text(f"{status.in_flight} in flight, {status.finished} finished, {status.dropped} dropped{_reasons(status)}"))
    facts.add_row("staleness", _histogram(status.staleness))
    facts.add_row("generation", Text(f"{status.tokens_per_second:,.0f} tokens/s"))
    if status.awaited:
        facts.add_row("waiting for", Text(status.awaited, style="yellow"))
    if status.dashboard:
        facts.add_row("Dask dashboard", Text(status.dashboard))
    rewards = Table.grid(padding=(0, 2))
    rewards.add_column(no_wrap=True)
    rewards.add_column()
    rewards.add_column(justify="right")
    for task, value in sorted(status.reward.items()):
        rewards.add_row(Text(task), ProgressBar(total=1.0, completed=min(max(value, 0.0), 1.0), width=_BAR_WIDTH), f"{value:.3f}")
    body: list[RenderableType] = [facts]
    if status.reward:
        body += [Text("\nreward, moving mean", style="dim"), rewards]
    return Panel(Group(*body), title=f"rollart · {status.phase} · {_clock(status.seconds)}", title_align="left", expand=False, padding=(1, 2))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _reasons(status: RunStatus) -> str:
    reasons = [f"{fate} {count}" for fate, count in sorted(status.fates.items()) if fate != "trained" and count]
    return f" ({', '.join(reasons)})" if reasons else ""


def _histogram(counts: dict[int, int]) -> Text:
    if not counts:
        return Text("none trained yet")
    top = max(max(counts.values()), 1)
    return Text("  ".join(f"{age} {_BLOCKS[round(count / top * (len(_BLOCKS) - 1))]} {count}" for age, count in sorted(counts.items())))
