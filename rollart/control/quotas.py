"""What a batch wants of each task, and which complete groups it takes. Pure: groups come in, a choice goes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollart.control.groups import OpenGroup
from rollart.control.staleness import StalenessWindow
from rollart.types import Group

ShortRule = Literal["wait", "fill"]
"""What a batch does while a task's quota is not there: wait for it, or fill its places with other tasks' groups."""


@dataclass(frozen=True, slots=True)
class TaskQuota:
    """A task's share of the plan: `quota` groups a batch, `group_size` members a group, of which `min_members` must survive.

    And which groups are worth a step: with `spread`, one whose members all scored the same teaches nothing, and with `replace_flat`
    another is played in its place; one of which more than `long_share` ran over their token budget is always replaced.
    """

    task: str
    quota: int
    group_size: int
    min_members: int
    spread: bool = True
    replace_flat: bool = False
    long_share: float = 1.0

    def teaches(self, group: Group) -> bool:
        """Whether there is something to learn from the scores of `group`."""
        return group.has_signal or not self.spread


def choose(
    groups: Iterable[OpenGroup], quotas: Mapping[str, TaskQuota], window: StalenessWindow, step: int, short: ShortRule
) -> list[OpenGroup] | None:
    """The groups of the batch for `step`, by task in the order of `quotas` and by index; None while they are not there.

    `wait`: every task's quota, the oldest of its complete groups first; the step is held while a group is running that would no longer find a
    place in time behind those as old as itself. `fill`: a task's complete groups up to its quota, then the oldest of the others' until the
    batch has as many as all quotas together.
    """
    by_task: dict[str, list[tuple[int, int, OpenGroup]]] = {task: [] for task in quotas}
    complete = dict.fromkeys(quotas, 0)
    for group in groups:
        task = group.episode.task
        by_task[task].append((group.oldest, group.episode.index, group))
        complete[task] += group.complete
    if sum(complete.values()) < sum(q.quota for q in quotas.values()) or (short == "wait" and any(complete[t] < q.quota for t, q in quotas.items())):
        return None
    taken: list[OpenGroup] = []
    spare: list[OpenGroup] = []
    for task, q in quotas.items():
        mine = sorted(by_task[task])
        ready = [group for _, _, group in mine if group.complete]
        if short == "wait" and _crowded_out([group for _, _, group in mine], ready[: q.quota], q.quota, window, step):
            return None
        taken += ready[: q.quota]
        spare += ready[q.quota :]
    missing = sum(q.quota for q in quotas.values()) - len(taken)
    taken += sorted(spare, key=lambda g: (g.oldest, g.episode.index, g.episode.task))[:missing]
    order = {task: i for i, task in enumerate(quotas)}
    return sorted(taken, key=lambda g: (order[g.episode.task], g.episode.index))


def _crowded_out(oldest_first: Sequence[OpenGroup], taken: Sequence[OpenGroup], quota: int, window: StalenessWindow, step: int) -> bool:
    """Whether a running group would outlive the window once the batch for `step` takes `taken`, since each later one has `quota` places."""
    gone = {id(group) for group in taken}
    running = False
    for place, group in enumerate(g for g in oldest_first if id(g) not in gone):
        running = running or not group.complete
        if running and place >= quota * (window.last_step(group.oldest) - step):
            return True
    return False


def missing(groups: Iterable[OpenGroup], quotas: Mapping[str, TaskQuota], window: StalenessWindow, step: int, short: ShortRule) -> dict[str, int]:
    """Complete groups that the batch for `step` still lacks, by task; empty when it can be formed."""
    groups = list(groups)
    if choose(groups, quotas, window, step, short) is not None:
        return {}
    found = {}
    for task, q in quotas.items():
        complete = sum(1 for g in groups if g.episode.task == task and g.complete)
        alone = [g for g in groups if g.episode.task == task]
        if choose(alone, {task: q}, window, step, "wait") is None:
            found[task] = max(1, q.quota - complete)
    return found
