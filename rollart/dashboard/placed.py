"""Where a run's work went, from its metrics: the classes that stood in for others, and the tasks that moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["NOWHERE_ELSE", "Placed", "placed"]


@dataclass(frozen=True, slots=True)
class Placed:
    """`fallbacks`: (task, stage, class wanted, class used) -> requests, or attempts for other stages than `generate`. `moves`: (step, task, from,
    to) in their order. `classes`: task -> the class that generated for it at the end, where that was found out by measuring."""

    fallbacks: Mapping[tuple[str, str, str, str], int]
    moves: Sequence[tuple[int, str, str, str]]
    classes: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        keys = ("task", "stage", "wanted", "used", "count")
        return {
            "fallbacks": [dict(zip(keys, (*key, count), strict=True)) for key, count in self.fallbacks.items()],
            "moves": [dict(zip(("step", "task", "from", "to"), move, strict=True)) for move in self.moves],
            "classes": dict(self.classes),
        }

    def figures(self) -> list[tuple[str, str]]:
        """As (name, text), of what there was."""
        found = []
        if self.fallbacks:
            texts = [f"{task} {stage} {wanted} -> {used} {count:,}" for (task, stage, wanted, used), count in self.fallbacks.items()]
            found.append(("served by a stand-in", ", ".join(texts)))
        if self.classes:
            found.append(("engines by task", ", ".join(f"{task} {name}" for task, name in self.classes.items())))
        if self.moves:
            found.append(("moves", ", ".join(f"{task} {before} -> {after} at {step}" for step, task, before, after in self.moves)))
        return found


NOWHERE_ELSE = Placed({}, (), {})
"""What there is to say of a run in which all work went where it was declared to."""


def placed(lines: Sequence[Mapping[str, Any]]) -> Placed:
    """From metrics lines: what each step counted, the moves, and the last step's map."""
    fallbacks: Counter[tuple[str, str, str, str]] = Counter()
    for line in lines:
        for entry in line.get("fallbacks", ()):
            fallbacks[entry["task"], entry["stage"], entry["wanted"], entry["used"]] += entry["count"]
    moves = [(int(line["step"]), line["task"], line["from"], line["to"]) for line in lines if line.get("kind") == "move"]
    maps = [line["placement"]["classes"] for line in lines if line.get("placement")]
    return Placed(dict(fallbacks), moves, maps[-1] if maps else {})
