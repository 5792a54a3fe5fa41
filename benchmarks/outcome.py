"""What every benchmark has in common: its options, its table, `NAME.json` and `NAME.png`. Measures nothing itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe, title

RESULTS = Path(__file__).parent / "results"


_MOST_COLUMNS = 4
"""More ways than this stand below each other, else a terminal cuts them short."""


class Unavailable(RuntimeError):
    """What a benchmark needs isn't installed here; the message says how it gets there."""


@dataclass(frozen=True)
class Outcome:
    """`rows`: one flat mapping an observation, one or more; the first entry names the way, floats are figures. The table
    shows those that all rows have.

    `headline`: the figures that goals are set on.
    """

    rows: Sequence[Mapping[str, Any]]
    headline: Mapping[str, float]


@dataclass(frozen=True)
class Benchmark:
    """`measure(quick)` takes the measurements, `draw(outcome)` makes the picture of them, from the stored JSON as well."""

    name: str
    claim: str
    measure: Callable[[bool], Outcome]
    draw: Callable[[Outcome], Figure]

    def main(self) -> None:
        """The command line of one benchmark."""

        @click.command(help=self.claim)
        @click.option("--quick", is_flag=True, help="fewer and shorter repetitions")
        @click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="folder for the JSON file and the picture")
        def command(quick: bool, out: Path) -> None:
            self.run(quick, out)

        command()

    def run(self, quick: bool, out: Path) -> None:
        """Measures, prints and writes."""
        machine = describe()
        outcome = self.measure(quick)
        show(self, outcome, machine)
        out.mkdir(parents=True, exist_ok=True)
        stored = {"name": self.name, "quick": quick, "machine": machine, "rows": list(outcome.rows), "headline": dict(outcome.headline)}
        (out / f"{self.name}.json").write_text(json.dumps(stored, indent=1, allow_nan=False) + "\n")
        self.redraw(out)

    def redraw(self, out: Path) -> None:
        """Draws the picture again from the JSON file."""
        stored = json.loads((out / f"{self.name}.json").read_text())
        figure = self.draw(Outcome(stored["rows"], stored["headline"]))
        figure.text(0.01, 0.005, title(stored["machine"]) + (", quick" if stored["quick"] else ""), fontsize=6, color="#718096")
        figure.savefig(out / f"{self.name}.png", dpi=150)


def spread(values: Sequence[float]) -> str:
    """`median (least to most)`."""
    return f"{median(values):,.3g} ({min(values):,.3g} to {max(values):,.3g})"


def show(benchmark: Benchmark, outcome: Outcome, machine: Mapping[str, Any]) -> None:
    """Prints each figure's median and spread by the rows' first column, and the headline."""
    console = Console()
    first, *others = outcome.rows[0]
    figures = [name for name in others if isinstance(outcome.rows[0][name], float) and all(name in row for row in outcome.rows)]
    table = Table(title=benchmark.claim, caption=title(dict(machine)), title_justify="left", caption_justify="left")
    groups = list(dict.fromkeys(row[first] for row in outcome.rows))
    values = {(group, name): spread([row[name] for row in outcome.rows if row[first] == group]) for group in groups for name in figures}
    many = len(groups) > _MOST_COLUMNS
    table.add_column("median (least to most)")
    for column in figures if many else groups:
        table.add_column(str(column).replace("_", " "))
    for line in groups if many else figures:
        cells = [values[(line, other) if many else (other, line)] for other in (figures if many else groups)]
        table.add_row(str(line).replace("_", " "), *cells)
    console.print(table)
    for name, value in outcome.headline.items():
        console.print(f"{name.replace('_', ' ')}: {value:,.4g}")
