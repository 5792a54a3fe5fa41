"""Says why an import path that a user gave leads nowhere; imports nothing itself."""

from __future__ import annotations


def why_not_imported(path: str, error: BaseException) -> str:
    """What `error` says of importing `path` (`module:name`), and where Python looks, if that is what went wrong.

    The command `rollart` does not look in the current folder, as `python -m` would.
    """
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name == path.partition(":")[0].partition(".")[0]:
        return f"{said}; put the folder that holds it into PYTHONPATH (PYTHONPATH=. for this one), or install it, here and on the workers"
    return said
