"""What failed and what happened around a run, from its metrics' lines: failed attempts by cause, and the notes that were told as it went on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Happening", "failures", "happenings"]

KINDS = frozenset({"silence", "workers", "told"})
"""Lines of metrics that tell of something around the run: nothing ended for long, a resource's workers went or came, a worker said something."""

FAILED = "failed:"
"""How an attempt's end begins that failed; its cause follows."""


@dataclass(frozen=True, slots=True)
class Happening:
    """What was told, in unix seconds; the text may have several lines."""

    time: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)


def happenings(lines: Iterable[Mapping[str, Any]]) -> tuple[Happening, ...]:
    """What happened around the run, in its order."""
    return tuple(Happening(float(line["time"]), str(line["text"])) for line in lines if line.get("kind") in KINDS and "text" in line)


def failures(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Failed attempts by cause, the most frequent first. Each line counts from the last start or resume on, so that the last before the next
    one holds what is to be added up; what failed between it and a kill is unknown."""
    total: Counter[str] = Counter()
    now: Counter[str] = Counter()
    for line in lines:
        if line.get("kind") in ("start", "resume"):
            total += now
            now = Counter()
        elif line.get("kind") == "step" and "ends" in line:
            now = Counter({end.removeprefix(FAILED): int(n) for end, n in line["ends"].items() if end.startswith(FAILED)})
    return dict((total + now).most_common())
