"""What became of each task's trajectories, from a run's metrics: its share of the batches, how long they waited for it, and what was dropped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollart.control.tallies import Tally

__all__ = ["TaskRollout", "task_rollouts"]

TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class TaskRollout:
    """A task's `share` of the groups of all batches, the `waited` seconds for which its groups were missing from one, and the tally of each fate
    of its members."""

    task: str
    share: float
    waited: float
    fates: Mapping[str, Tally]

    @property
    def dropped(self) -> Mapping[str, Tally]:
        """The fates but `trained`, the most frequent first."""
        others = {fate: tally for fate, tally in self.fates.items() if fate != TRAINED and tally.members}
        return dict(sorted(others.items(), key=lambda item: -item[1].members))

    def to_dict(self) -> dict[str, Any]:
        fates = {
            fate: {**asdict(tally), "mean_sampled": tally.mean_sampled, "least_sampled": tally.least_sampled} for fate, tally in self.fates.items()
        }
        return {"share": self.share, "waited": self.waited, "fates": fates}


def task_rollouts(lines: Sequence[Mapping[str, Any]]) -> tuple[TaskRollout, ...]:
    """One for each task that the step lines name, in their order; tallies are those of the last line, which count from the run's beginning."""
    steps = [line for line in lines if line.get("kind") == "step" and "by_task" in line]
    groups: Counter[str] = Counter()
    waited: defaultdict[str, float] = defaultdict(float)
    for line in steps:
        groups.update(line["groups"])
        for task, seconds in line["waited"].items():
            waited[task] += seconds
    last = steps[-1]["by_task"] if steps else {}
    total = groups.total()
    return tuple(
        TaskRollout(task, groups[task] / total if total else 0.0, waited[task], {fate: Tally(**tally) for fate, tally in fates.items()})
        for task, fates in last.items()
    )
