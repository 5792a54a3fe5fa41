"""`rollart env ...`: the environments there are, and trying one; each a thin function."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import click

from rollart.command import FAILED, clean_errors, fail, json_option
from rollart.config import ConfigError
from rollart.environments.catalogue import AmbiguousName, Entry, known
from rollart.yaml_text import WrongYaml, read_yaml


@click.group()
def env() -> None:
    """Environments: list them, and play one here, turn by turn."""


@env.command("list")
@json_option
@clean_errors()
def list_environments(as_json: bool) -> None:
    """Lists the environments by name: whose they are, and whether what they need is installed."""
    try:
        entries = [entry for _, entry in sorted(known().items())]
    except AmbiguousName as error:
        raise ConfigError(str(error)) from error
    if as_json:
        rows = [{"name": e.name, "path": e.path, "from": e.origin, "extra": e.extra, "installed": not e.missing} for e in entries]
        click.echo(json.dumps({"ok": True, "environments": rows}))
        return
    for entry in entries:
        click.echo(f"{entry.name:14} {entry.origin:20} {_state(entry)}")


def _state(entry: Entry) -> str:
    return f"needs {', '.join(entry.missing)}: {entry.how_to_install}" if entry.missing else "installed"


@env.command("try")
@click.argument("name")
@click.option("--set", "overrides", multiple=True, metavar="settings.X=Y", help="One of the environment's settings; may be repeated.")
@click.option("--policy", default="scripted", show_default=True, metavar="scripted|random|human|URL", help="Who plays; a URL ending in /v1 is OpenAI's API, any other an engine's.")  # fmt: skip # noqa: E501
@click.option("--seed", default=0, show_default=True, help="Seed of the first episode; the others follow.")
@click.option("--episodes", default=1, show_default=True, type=click.IntRange(min=1), help="How many to play.")
@click.option("--turns", default=50, show_default=True, type=click.IntRange(min=1), help="Actions an episode may take at most.")
@click.option("--model", help="A served policy's name, at a URL ending in /v1; default: the first that it lists.")
@click.option("--tokenizer", type=click.Path(), help="Folder of an engine's tokenizer.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(min=1), help="Tokens of a served policy's answer at most.")
@json_option
@clean_errors()
def try_environment(
    name: str, overrides: tuple[str, ...], policy: str, seed: int, episodes: int, turns: int, model: str | None, tokenizer: str | None,
    max_tokens: int, as_json: bool,
) -> None:  # fmt: skip
    """Plays environment NAME (a name that `rollart env list` shows, or module:Class) and prints each turn."""
    from rollart.trying import POLICIES, EpisodeBroke, Served, play

    if policy not in POLICIES and not policy.startswith(("http://", "https://")):
        raise ConfigError(f"--policy {policy}: write {', '.join(POLICIES)} or a URL")
    settings = _settings(overrides)
    player = policy if policy in POLICIES else Served(policy, model, tokenizer, max_tokens)
    ended = []
    for number in range(seed, seed + episodes):
        click.echo(f"--- episode, seed {number}", err=as_json)
        try:
            ended.append(asyncio.run(play(name, settings, player, number, turns, lambda what, text: _show(what, text, as_json), _read)))
        except EpisodeBroke as error:
            fail(f"{name}, seed {number}: {error}", FAILED, as_json)
        last = ended[-1]
        click.echo(f"--- {last['ended']} after {last['turns']} turns, reward {last['reward']:g}", err=as_json)
    if as_json:
        click.echo(json.dumps({"ok": True, "episodes": ended}))


def _settings(overrides: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for override in overrides:
        path, sign, value = override.partition("=")
        head, dot, field = path.partition(".")
        if not sign or head != "settings" or not dot or not field or "." in field:
            raise ConfigError(f"--set {override}: write settings.NAME=VALUE, such as settings.turns=5")
        try:
            settings[field] = read_yaml(value)
        except WrongYaml as error:
            raise ConfigError(f"--set {override[:80]}: the value is no valid YAML ({error}); quote it if it is text") from error
    return settings


def _show(what: str, text: str, as_json: bool) -> None:
    lines = text.rstrip("\n").split("\n")
    click.echo("\n".join([f"{what + ':':13}{lines[0]}", *(" " * 13 + line for line in lines[1:])]), err=as_json)


def _read() -> str:
    click.echo("your action: ", nl=False, err=True)
    line = sys.stdin.readline()
    if not line:
        raise ConfigError("the input ended before the episode did")
    return line.rstrip("\n")
