"""The storage's parts know of each other one way only, and of nothing else in the project."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage

BELOW = {
    "objects": set(),
    "format": {"objects"},
    "arrays": {"objects", "format"},
    "deltas": {"objects", "format", "arrays"},
    "keeping": {"objects", "format", "arrays", "deltas"},
    "peers": {"objects", "format"},
}
"""Part -> the parts that it may import. `models`, and the modules beside the parts, are on top of all of these."""

LEAVES = {"errors", "version", "progress"}
"""Modules that import nothing of the storage but each other."""

ROOT = Path(storage.__file__).parent


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def parts_of(files: list[Path]) -> set[str]:
    return {name.split(".")[1] for file in files for name in imported(file) if name.startswith("storage.")}


@pytest.mark.parametrize("part", BELOW)
def test_a_part_imports_those_below_it_only(part):
    files = sorted((ROOT / part).glob("*.py"))
    assert len(files) > 1
    assert parts_of(files) - {part} <= BELOW[part] | LEAVES


def test_leaves_import_nothing_but_each_other():
    assert parts_of([ROOT / f"{name}.py" for name in LEAVES]) <= LEAVES


def test_the_storage_imports_nothing_else_of_the_project():
    found = {name.split(".")[0] for file in ROOT.rglob("*.py") for name in imported(file)}
    assert not found & {"rollart", "flows", "benchmarks", "tests"}
