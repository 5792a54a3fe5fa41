"""What all sub-commands of the command line share: exit codes, how an error is told, and `--json`. Runs nothing itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

import click

from rollart.config import ConfigError

USER_ERROR, FAILED, INTERRUPTED = 2, 3, 130

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line, and nothing else on it.")


def clean_errors(interrupted: str = "interrupted") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a user's error into one clear line and an exit code, and so Ctrl-C, of which `interrupted` is told."""

    def around(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            from storage.errors import StoreError

            try:
                command(*args, **kwargs)
            except (ConfigError, StoreError) as error:
                fail(str(error), USER_ERROR, kwargs.get("as_json", False))
            except KeyboardInterrupt:
                fail(interrupted, INTERRUPTED, kwargs.get("as_json", False))

        return wrapped

    return around


def fail(message: str, code: int, as_json: bool, said: Mapping[str, Any] | None = None) -> NoReturn:
    """Ends the process with `code` and one line of `message`; in JSON too if asked for, with what else is `said`."""
    click.echo(f"rollart: {message}", err=True)
    if as_json:
        click.echo(json.dumps({"ok": False, "error": message, "exit_code": code, **(said or {})}))
    sys.exit(code)
