"""Makes an environment from its name and settings; imports an environment only when it is asked for. The names are the catalogue's."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rollart.environments.catalogue import AmbiguousName, find, known
from rollart.environments.protocol import Agent, Environment, is_agent
from rollart.import_paths import why_not_imported


class UnknownEnvironment(ValueError):
    """No environment has that name."""


class EnvironmentSettingsError(ValueError):
    """An environment refuses its settings; the message names the field."""


class EnvironmentFailed(ValueError):
    """An environment's own code raised where it was made; the message holds what."""


class Settings(BaseModel):
    """Base of what a shipped environment can be told: unknown fields are refused, and nothing changes once made."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def resolve(name: str) -> type[Environment] | type[Agent]:
    """The class, of an environment or an agent, that `name` (one of the catalogue's, or an import path `module:Class`) stands for.

    UnknownEnvironment if there is none, or if the extra that it needs isn't installed.
    """
    path = name if ":" in name else _path(name)
    try:
        found = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:  # importing runs a user's module, which may end in anything
        raise UnknownEnvironment(f"environment {name!r} cannot be imported from {path!r}: {why_not_imported(path, error)}") from error
    missing = [m for m in ("reset", "step", "close") if not callable(getattr(found, m, None))]
    if not isinstance(found, type) or (missing and not is_agent(found)):
        raise UnknownEnvironment(f"{path!r} is no environment class, and without run() no agent; it lacks {', '.join(missing) or 'being a class'}")
    return found


def _path(name: str) -> str:
    try:
        entry = find(name)
    except AmbiguousName as error:
        raise UnknownEnvironment(str(error)) from error
    if entry is None:
        raise UnknownEnvironment(f"unknown environment {name!r}; known are {', '.join(sorted(known()))}, and any import path module:Class")
    if missing := entry.missing:
        raise UnknownEnvironment(f"environment {name!r} needs {', '.join(missing)}: {entry.how_to_install}, here and on the workers")
    return entry.path


def make(name: str, **settings: Any) -> Environment | Agent:
    """A new environment, or agent, `name` with `settings`.

    A class with a pydantic model as its attribute `Settings` gets that model; any other gets the settings as keyword arguments.
    Raises UnknownEnvironment, EnvironmentSettingsError with the field's name, or EnvironmentFailed with what the class raised.
    """
    cls: Any = resolve(name)
    model = getattr(cls, "Settings", None)
    if model is not None:
        try:
            return _made(name, cls, model(**settings))
        except ValidationError as error:
            raise EnvironmentSettingsError(f"environment {name!r}: {_first(error)}") from error
    try:
        inspect.signature(cls).bind(**settings)
    except TypeError as error:
        raise EnvironmentSettingsError(f"environment {name!r}: {error}") from error
    return _made(name, cls, **settings)


def _made(name: str, cls: Any, *args: Any, **settings: Any) -> Environment | Agent:
    try:
        made: Environment | Agent = cls(*args, **settings)
    except (ValidationError, EnvironmentSettingsError):
        raise
    except (Exception, SystemExit) as error:  # a user's code, which may end in anything
        raise EnvironmentFailed(f"environment {name!r} cannot be made with these settings: {type(error).__name__}: {error}") from error
    return made


def _first(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    field = ".".join(str(part) for part in first["loc"]) or "settings"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{field}: {first['msg']}, got {first['input']!r}{more}"
