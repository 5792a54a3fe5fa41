"""Where `rollart weights` finds its stores: locations and storage options as written on a command line. Echoes no option's value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from rollart.config import ConfigError

if TYPE_CHECKING:
    from storage.version import Version
    from storage.weights import WeightStore

_option = click.option(
    "--option", "pairs", multiple=True, metavar="KEY=VALUE", help="An fsspec option of the store, as text, true or false; may be repeated."
)
_options = click.option("--options", "text", metavar="JSON", help="The same as one object, for numbers and nested ones.")
_to_option = click.option("--to-option", "to_pairs", multiple=True, metavar="KEY=VALUE", help="The same for the other store or folder.")
_to_options = click.option("--to-options", "to_text", metavar="JSON", help="Default: those of the first where both have one protocol.")


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of a command that opens one store; they arrive as `pairs` and `text`."""
    return _option(_options(command))


def two_stores_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of a command with a second store or folder; its own arrive as `to_pairs` and `to_text`."""
    return store_options(_to_option(_to_options(command)))


def parsed_options(pairs: tuple[str, ...], text: str | None) -> dict[str, Any]:
    """Storage options from the command line; an error names no value, since it may be a secret."""
    options: Any = {}
    try:
        options = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise ConfigError('--options is no JSON object: write \'{"KEY": "VALUE"}\'')
    for number, pair in enumerate(pairs, 1):
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ConfigError(f"--option number {number} has no '=' after a key: write KEY=VALUE")
        options[key] = {"true": True, "false": False}.get(value, value)
    return dict(options)


def both_options(first: str, second: str, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of two locations. Those of the first serve the second too, if it has none of its own: where both have one protocol,
    or where the first is a path, which has none."""
    options, to_options = parsed_options(given["pairs"], given["text"]), parsed_options(given["to_pairs"], given["to_text"])
    alike = "://" not in first or first.partition("://")[0] == second.partition("://")[0]
    return options, to_options or (options if alike else {})


def open_store(url: str, options: dict[str, Any]) -> WeightStore:
    """The store at `url`; ConfigError if that names one of its versions."""
    from storage.weights import WeightStore

    found, ref = split_location(url)
    if ref is not None:
        raise ConfigError(f"a store is meant here, not one of its versions: leave out @{ref}")
    return WeightStore(found, options)


def located(location: str, options: dict[str, Any]) -> tuple[WeightStore, Version]:
    """The store and the version that `location` names."""
    from storage.weights import WeightStore

    url, ref = split_location(location)
    store = WeightStore(url, options)
    return store, store.resolve(ref)


def split_location(location: str) -> tuple[str, str | None]:
    """URL and what follows its `@`."""
    from storage.refs import parse_location

    return parse_location(location)


def parsed_version(text: str) -> Version:
    """The version that `--as` names."""
    from storage.version import Version

    try:
        return Version.parse(text)
    except ValueError as error:
        raise ConfigError(f"--as: {error}") from error
