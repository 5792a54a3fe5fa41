"""Progress as a log file and as a terminal show it."""

import io

from rich.console import Console

from rollart.dashboard.progress import Progress, plain_line, render
from rollart.dashboard.status import RunStatus


def status(step: int = 12, **changes: object) -> RunStatus:
    fields = {
        "step": step, "steps": 60, "version": "0-12", "phase": "training", "in_flight": 32, "finished": 410,
        "fates": {"trained": 384, "stale": 8, "no signal": 16}, "reward": {"frozenlake": 0.25, "chain_sum": 0.5},
        "staleness": {0: 300, 1: 84},
        "tokens_per_second": 1234.5, "dashboard": "http://127.0.0.1:8787/status", "seconds": 3725.0,
    }  # fmt: skip
    return RunStatus(**(fields | changes))


def test_a_line_says_where_the_run_is_and_what_it_waits_for():
    line = plain_line(status(awaited="engine 0 since 12 s"))
    assert line == (
        "1:02:05 training step 12/60 version 0-12 | reward chain_sum=0.500 frozenlake=0.250 | in flight 32 | finished 410 | "
        "dropped 24 (no signal 16, stale 8) | staleness 0:300 1:84 | 1,234 tokens/s | waiting for engine 0 since 12 s"
    )


def test_a_log_file_gets_one_line_a_step_and_the_dashboard_once():
    out = io.StringIO()
    with Progress("auto", out) as progress:
        for step in (1, 1, 1, 2, 2):
            progress.update(status(step, in_flight=step))
        progress.update(status(2, phase="evaluating"))
    lines = out.getvalue().splitlines()
    assert lines[0] == "Dask dashboard: http://127.0.0.1:8787/status"
    assert [line.split(" version")[0] for line in lines[1:]] == [
        "1:02:05 training step 1/60",
        "1:02:05 training step 2/60",
        "1:02:05 evaluating step 2/60",
    ]


def test_quiet_mode_writes_nothing():
    out = io.StringIO()
    with Progress("quiet", out) as progress:
        progress.update(status())
        progress.note("warm-up done")
    assert out.getvalue() == ""


def test_the_panel_shows_every_figure_and_takes_names_literally():
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(render(status(reward={"[red]odd[/red]": 0.75}, awaited="[bold]an engine")))
    text = console.file.getvalue()
    for part in (
        "12/60",
        "0-12",
        "32 in flight, 410 finished, 24 dropped",
        "1,234 tokens/s",
        "[red]odd[/red]",
        "0.750",
        "[bold]an engine",
        "8787",
    ):
        assert part in text


def test_a_terminal_gets_the_panel_and_notes_above_it():
    out = io.StringIO()
    progress = Progress("live", out)
    with progress:
        progress.update(status())
        progress.note("warm-up done")
        progress.update(status(13))
    assert "13/60" in out.getvalue()
    assert "warm-up done" in out.getvalue()
