"""The command line: `rollart ...`, also `dask rollart ...`. Each sub-command is one thin function; exit codes are

0 done, 2 the user's error, 3 the run failed, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import resources
from pathlib import Path

import click

from rollart.command import clean_errors, fail, json_option
from rollart.config import Config, ConfigError, load, parse
from rollart.env_cli import env
from rollart.weights_cli import weights

FLOWS = ("train", "sft", "evaluate")

HERE = ("training.draft.online=false", "engine.speculation={draft: none}")
"""What `rollart draft` makes of a run's configuration: the head learns in this process, and no engine is started."""


@click.group(name="rollart", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rollart")
def main() -> None:
    """Multi-task agentic reinforcement learning for language models on Dask."""


main.add_command(weights)
main.add_command(env)


@main.command()
@click.argument("flow", type=click.Choice(FLOWS))
@click.option("--config", "config_path", type=click.Path(dir_okay=False), help="YAML file; default: the quick start's.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override one field; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and whether the cluster can run it, and stop.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint of the run (of the newest run, where run.name is not set).")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@json_option
@clean_errors("interrupted before the run began")
def run(flow: str, config_path: str | None, overrides: tuple[str, ...], dry_run: bool, resume: bool, quiet: bool, as_json: bool) -> None:
    """Runs FLOW from start to end."""
    config = _resumed_config(list(overrides)) if resume and config_path is None else load(config_path or _shipped("quickstart.yaml"), list(overrides))
    if dry_run:
        _dry_run(config, as_json)
        return
    _quiet_dask()
    from rollart.running import run_flow

    ended = run_flow(flow, config, resume=resume, mode="quiet" if quiet else "auto")
    if ended.error is not None:
        fail(ended.error, ended.exit_code, as_json)
    if not quiet:
        click.echo(ended.table)
    if as_json:
        click.echo(json.dumps({"ok": True, "run": ended.url, "exit_code": ended.exit_code, **ended.summary}))
    sys.exit(ended.exit_code)


def _quiet_dask() -> None:
    """Leaves the terminal to the run: Dask tells of each connection otherwise, and of each failed task what its caller hears anyway.

    By the environment, since distributed reads it once, at its import, here and in every worker process.
    """
    if not any(name.startswith("DASK_LOGGING") for name in os.environ):
        os.environ["DASK_LOGGING"] = "{'distributed': 'error', 'distributed.worker': 'critical'}"


def _dry_run(config: Config, as_json: bool) -> None:
    from rollart.preparation import check_inputs

    check_inputs(config)
    from rollart.cluster import look

    workers, problems = look(config)
    if not as_json:
        click.echo(config.to_yaml(), nl=False)
        click.echo("# workers: " + (", ".join(f"{w.name} ({', '.join(w.resources)})" for w in workers) or "none"))
        for stage, why in config.idle.items():
            click.echo(f"# stages.{stage}: idle, since {why}")
    if problems:
        raise ConfigError("\n".join(problems))
    if as_json:
        said = {"config": config.model_dump(mode="json"), "workers": [w.name for w in workers], "idle": list(config.idle)}
        click.echo(json.dumps({"ok": True, **said}))
    else:
        click.echo("# the cluster can run this")


@main.command()
@click.option("--root", default="runs", show_default=True, help="Folder or URL that holds the runs.")
@json_option
@clean_errors()
def runs(root: str, as_json: bool) -> None:
    """Lists the runs under a folder or URL."""
    from rollart.run import about, names

    found = [about(root, name) for name in names(root)]
    if not as_json:
        for entry in found:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["created"]))
            click.echo(f"{entry['name']:32} {entry['flow']:10} {when}  {entry['state']}")
        if not found:
            click.echo(f"no runs under {root}")
    else:
        click.echo(json.dumps({"ok": True, "runs": found}))


@main.command()
@click.argument("run_url", metavar="RUN")
@json_option
@clean_errors()
def report(run_url: str, as_json: bool) -> None:
    """Writes RUN's report (a run's folder or URL) and prints its summary."""
    from rollart.run import RunFolder
    from rollart.running import report_on

    folder = RunFolder(run_url)
    folder.config()  # says so if there is no run
    url, summary, table = report_on(folder)
    click.echo(json.dumps({"ok": True, "report": url, **summary}) if as_json else f"{table}\nreport: {url}")


@main.command()
@click.argument("run_url", metavar="RUN")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Change one field of draft_training or training; may be repeated.")
@json_option
@clean_errors("interrupted; nothing was published")
def draft(run_url: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Trains a draft head from what RUN (a run's folder or URL) has sampled, here, and publishes it."""
    from rollart.run import RunFolder

    folder = RunFolder(run_url)
    config = parse(folder.config().to_yaml(), [*HERE, *overrides])
    from flows.draft import draft as flow
    from rollart.drafting import open_drafting

    with open_drafting(config, folder) as drafting:
        made = flow(drafting, lambda text: click.echo(text, err=True))
    if as_json:
        said = {"store": made.store, "version": str(made.version), "before": list(made.before), "after": list(made.after)}
        click.echo(json.dumps({"ok": True, **said}))
        return
    click.echo("token   acceptance before   after")
    for place, (before, after) in enumerate(zip(made.before, made.after, strict=True), 1):
        click.echo(f"{place:5}   {before:17.3f}   {after:5.3f}")
    click.echo(f"head: {made.store}@{made.version}")


def _resumed_config(overrides: list[str]) -> Config:
    """The configuration that the run to be resumed was started with, with what the user changes now."""
    from rollart.run import find

    asked = load(_shipped("quickstart.yaml"), [o for o in overrides if o.startswith("run.")])
    folder = find(asked.run)
    return parse(folder.config().to_yaml(), [f"run.name={json.dumps(folder.name)}", *overrides])


def _shipped(name: str) -> Path:
    """A configuration that comes with the package."""
    return Path(str(resources.files("flows").joinpath("configs", name)))
