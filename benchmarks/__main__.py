"""`python -m benchmarks [--quick] [--figures] [--out DIR]`: all benchmarks, or all pictures again from stored results."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

import click

import benchmarks
from benchmarks.outcome import RESULTS, Benchmark, Unavailable


def found() -> list[Benchmark]:
    """Every module of the package that defines a `BENCHMARK`, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__")
    modules = [import_module(f"benchmarks.{name}") for name in names]
    return [module.BENCHMARK for module in modules if hasattr(module, "BENCHMARK")]


@click.command()
@click.option("--quick", is_flag=True, help="fewer and shorter repetitions")
@click.option("--figures", is_flag=True, help="measure nothing; draw the pictures of the results that are there")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="folder of the results")
def main(quick: bool, figures: bool, out: Path) -> None:
    """Runs every benchmark, but those whose extra packages aren't here."""
    for benchmark in found():
        if not figures:
            try:
                benchmark.run(quick, out)
            except Unavailable as missing:
                click.echo(f"{benchmark.name} left out: {missing}", err=True)
        elif (out / f"{benchmark.name}.json").exists():
            benchmark.redraw(out)


if __name__ == "__main__":
    main()
