"""Reads YAML that people write; owns what it refuses beyond YAML's own rules, and knows no field."""

from __future__ import annotations

from typing import Any

import yaml


class WrongYaml(ValueError):
    """Text that is no YAML, or says a thing twice; `where` is " line L, column C", empty if unknown."""

    def __init__(self, problem: str, where: str = "") -> None:
        super().__init__(problem)
        self.where = where


class _Loader(yaml.SafeLoader):
    """The safe loader, which would let a key's second value replace the first without a word, and a value contain itself."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            said = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if said in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(said)
        return super().construct_mapping(node, deep=True)  # at once, and not after its parent: so what contains itself is found


def read_yaml(text: str) -> Any:
    """What the first document of `text` says; WrongYaml with the reason and the place."""
    try:
        return yaml.load(text, _Loader)  # a subclass of the safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise WrongYaml(str(error.problem), where) from error
    except yaml.reader.ReaderError as error:
        code = ord(error.character) if isinstance(error.character, str) else error.character
        raise WrongYaml(f"character #x{code:04x} is not allowed") from error
    except RecursionError:
        raise WrongYaml("it is nested too deeply") from None
    except (ValueError, KeyError, AttributeError) as error:  # what the constructors of numbers, dates and tagged values raise
        raise WrongYaml(f"{type(error).__name__} in a number, a date or a tagged value: {error}") from error
