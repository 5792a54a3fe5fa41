"""How `rollart weights` shows versions, their differences and its progress: plain values, lines of text, a bar on stderr."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from storage.differences import TensorDifference
    from storage.format.commit import Commit
    from storage.progress import Progress


def about(commit: Commit) -> dict[str, Any]:
    """What a list says of a version; bytes as stored, `created` in seconds since 1970."""
    from storage.models.adapters import ADAPTER

    whole = "adapter" if ADAPTER in commit.metadata else "full"
    return {
        "kind": whole if commit.base is None else f"delta of {commit.base}", "bytes": commit.bytes, "created": commit.created,
        "parent": None if commit.parent is None else str(commit.parent), "base": None if commit.base is None else str(commit.base),
    }  # fmt: skip


def difference(d: TensorDifference) -> dict[str, Any]:
    """One tensor's difference as JSON values."""
    forms = {side: None if at is None else {"dtype": at[0], "shape": list(at[1])} for side, at in (("before", d.before), ("after", d.after))}
    return {"name": d.name, "kind": d.kind, **forms, **(measured(d) if d.kind in ("changed", "same") else {})}


def measured(d: TensorDifference) -> dict[str, Any]:
    """The measures as JSON values: what isn't finite as text, since JSON has no word for it."""
    found = {"changed_share": d.changed_share, "max_abs": d.max_abs, "relative_l2": d.relative_l2}
    return {"values": d.values, "changed": d.changed, **{name: value if math.isfinite(value) else str(value) for name, value in found.items()}}


def measures(found: dict[str, Any]) -> str:
    """What `measured` gives, in words."""
    share, largest, relative = (float(found[name]) for name in ("changed_share", "max_abs", "relative_l2"))
    return f"{share:.4%} changed, by {largest:.3g} at most, relative L2 {relative:.3g}"


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A bar on the terminal that stderr is; nothing where it is none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def say(as_json: bool, line: str, said: dict[str, Any]) -> None:
    """Prints what was done: `said` as JSON, or `line`."""
    if as_json:
        print_json(said)
    else:
        click.echo(line)


def print_json(said: dict[str, Any]) -> None:
    """Prints one JSON object, the only thing on stdout."""
    click.echo(json.dumps({"ok": True, **said}))


def when(created: float) -> str:
    """Seconds since 1970 as local time; as they are if no clock shows them."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    except (ValueError, OverflowError, OSError):
        return f"{created} s"


def plain(text: str) -> str:
    """Text from a store with anything escaped that would move a terminal's cursor."""
    return repr(text)[1:-1]


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
