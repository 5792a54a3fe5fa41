"""Reads a configuration from YAML and `--set a.b=c`, and compares two. Every refusal names the field's path and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollart.config.section import ConfigError
from rollart.config.whole import Config
from rollart.yaml_text import WrongYaml, read_yaml

RESUMABLE = {
    "run.dashboard_port", "run.lease", "run.scheduler", "run.step_timeout", "train.steps", "train.checkpoint_every",
    "train.max_skipped", "training.ranks", "evaluate", "rollout", "hardware", "weights", "placement",
}  # fmt: skip
"""Fields (and sections) that may differ when a run is resumed; any other would make the curve one of two different experiments."""


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads a YAML file and applies `a.b=c` overrides. ConfigError with one line a problem."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config: {path} can't be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config: {path} is no UTF-8 text; give the path of a YAML file") from error
    return parse(text, overrides, source=str(path))


def parse(text: str, overrides: list[str] | None = None, source: str = "configuration") -> Config:
    """The configuration that YAML `text` and `overrides` say."""
    try:
        data = read_yaml(text)
    except WrongYaml as error:
        raise ConfigError(f"{source}:{error.where} is no valid YAML ({error}); mend that line") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping of sections ({', '.join(Config.model_fields)}), found {type(data).__name__}")
    for override in overrides or []:
        _set(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from error


def changed_fields(old: Config, new: Config) -> list[str]:
    """Paths whose values differ, without those that `RESUMABLE` allows."""
    differing = _differing(old.model_dump(mode="json"), new.model_dump(mode="json"))
    return [p for p in differing if not any(p == r or p.startswith(r + ".") for r in RESUMABLE)]


def _differing(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [p for k in keys for p in _differing(old.get(k), new.get(k), f"{path}.{k}".lstrip("."))]
    return [] if old == new else [path]


_NUMBER = re.compile(r"[0-9]{1,9}")


def _set(data: dict[str, Any], override: str) -> None:
    """Applies one `a.b=c`; `c` is read as YAML, a number in the path indexes a list, a name in a list finds the item of that name."""
    path, sign, value = override.partition("=")
    if not sign or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", path):
        raise ConfigError(f"--set {override}: write a path, an equals sign and a value, such as train.steps=50")
    *parents, last = path.split(".")
    here: Any = data
    for i, key in enumerate(parents):
        where = ".".join(parents[: i + 1])
        if isinstance(here, dict):
            if here.get(key) is None:
                here[key] = {}
            here = here[key]
        else:
            here = _item(here, key, where)
    try:
        parsed = read_yaml(value)
    except WrongYaml as error:
        raise ConfigError(f"--set {override[:80]}: the value is no valid YAML ({error}); quote it if it is text") from error
    if isinstance(parsed, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", parsed):
        parsed = float(parsed)  # YAML 1.1 wants a dot in 1e-3; people don't write one
    if isinstance(here, dict):
        here[last] = parsed
    elif isinstance(here, list) and _NUMBER.fullmatch(last) and int(last) < len(here):
        here[int(last)] = parsed
    else:
        raise ConfigError(f"--set {override}: {'.'.join(parents)} holds no field {last!r}; name a section's field")


def _item(here: Any, key: str, where: str) -> Any:
    if isinstance(here, list):
        if _NUMBER.fullmatch(key) and int(key) < len(here):
            return here[int(key)]
        for item in here:
            if isinstance(item, dict) and item.get("name") == key:
                return item
    raise ConfigError(f"--set {where}: there is no such entry; use a field's path, and in a list an item's name or number")


def _explain(error: Any) -> str:
    path = ".".join(str(p) for p in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown field; remove it or correct its spelling"
    if error["type"] == "missing":
        return f"{path}: missing; set it"
    if not path:
        return message
    if error["type"] == "value_error":
        return f"{path}: {message}"
    return f"{path}: {message[0].lower() + message[1:]}, got {error['input']!r}; correct the value"
