"""Writes docs/configuration.md from the configuration models: every field with its type, default and meaning. Invents no word."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollart.config import RESUMABLE, Config

TARGET = Path(__file__).with_name("configuration.md")

HEAD = """# Configuration

Generated from the models in `rollart/config/` by `make docs`; change the words there.

A configuration is a YAML file with the sections below. `--set a.b=c` overrides one field, `--dry-run` prints the resolved whole.
Unknown keys, values out of bounds and contradictions are refused with the field's path. Fields marked ↻ may change when a run is resumed.
The sections {required} must be given; the others have defaults. `flows/configs/quickstart.yaml` is one to begin with.
"""


def main() -> None:
    TARGET.write_text(render())


def render() -> str:
    """The page as Markdown."""
    return HEAD.format(required=_required()) + "".join(_section(path, model) for path, model in sections(Config))


def _required() -> str:
    """Names of the sections without a default, for a sentence."""
    *names, last = (f"`{name}`" for name, field in Config.model_fields.items() if field.is_required())
    return f"{', '.join(names)} and {last}"


def sections(model: type[BaseModel], path: str = "") -> list[tuple[str, type[BaseModel]]]:
    """All models below `model` with the path of their fields, depth first; an item of a list is `name[]`, one of a mapping `name.<key>`."""
    found = [(path, model)]
    for name, field in model.model_fields.items():
        for part, suffix in _models(field.annotation):
            found += sections(part, f"{path}.{name}{suffix}".lstrip("."))
    return found


def _models(annotation: Any, suffix: str = "") -> list[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, suffix)]
    origin = typing.get_origin(annotation)
    suffix += {list: "[]", tuple: "[]", dict: ".<name>"}.get(origin, "")
    return [found for part in typing.get_args(annotation) for found in _models(part, suffix)]


def _section(path: str, model: type[BaseModel]) -> str:
    rows = [_row(path, name, field) for name, field in model.model_fields.items() if not _models(field.annotation)]
    words = " ".join((model.__doc__ or "").split())
    if not rows:
        return f"\n{words}\n"
    return f"\n## {path or 'Top level'}\n\n{words}\n\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n" + "".join(rows)


def _row(path: str, name: str, field: FieldInfo) -> str:
    whole = f"{path}.{name}".lstrip(".")
    parts = whole.split(".")
    mark = " ↻" if any(".".join(parts[: i + 1]) in RESUMABLE for i in range(len(parts))) else ""
    cells = [f"`{name}`{mark}", f"{_type(field.annotation)}{_bounds(field)}", _default(field), field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in parts if part is not type(None))
    if origin is dict:
        return f"{_type(parts[1])} by {_type(parts[0])}"
    if origin in (list, tuple):
        return f"list of {_type(parts[0])}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", typing.Any: "any value"}
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _bounds(field: FieldInfo) -> str:
    signs = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt"), MultipleOf: ("a multiple of", "multiple_of")}
    found = [f"{sign} {getattr(bound, name)}" for bound in field.metadata for kind, (sign, name) in signs.items() if isinstance(bound, kind)]
    return f", {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "none" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    main()
