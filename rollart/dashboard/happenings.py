"""What failed and what happened around a run, from its metrics' lines: failed attempts by cause, and the notes that were told as it went on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


def failures(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Failed attempts by cause, the most frequent first: those of the last step line, since each counts from the run's beginning, over its
    resumes. What failed between a step and a kill is unknown."""
    ends: Mapping[str, int] = next((line["ends"] for line in reversed(lines) if line.get("kind") == "step" and "ends" in line), {})
    found = Counter({end.removeprefix(FAILED): int(n) for end, n in ends.items() if end.startswith(FAILED)})
    return dict(found.most_common())
