"""What an environment worker knows of the engines that its requests went to, and the other side of that: who wants which class, what each
request took, and how often another class than the wanted one served. Owns counts and their form on the wire, sends nothing itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollart.control.placement import Usage
from rollart.types import GenerateResult

__all__ = ["Fallen", "News", "UsageCounts"]

Fallen = tuple[str, str, str]
"""Task, class wanted, class used."""


@dataclass(frozen=True, slots=True)
class News:
    """What happened at a worker since it last told: requests that another class served, and what requests took by (task, class)."""

    fallen: Mapping[Fallen, int]
    used: Mapping[tuple[str, str], Usage]

    @classmethod
    def read(cls, message: Mapping[str, list[list[float | str]]]) -> News:
        """From a message that `UsageCounts.take` made."""
        fallen = {(str(task), str(wanted), str(used)): int(n) for task, wanted, used, n in message["fallen"]}
        return cls(fallen, {(str(task), str(name)): Usage(*map(float, values)) for task, name, *values in message["used"]})


@dataclass(slots=True)
class UsageCounts:
    """Counts until they are taken. `measuring`: whether what requests take is wanted too, and not their fallbacks alone."""

    measuring: bool
    _fallen: Counter[Fallen] = field(default_factory=Counter)
    _used: defaultdict[tuple[str, str], Usage] = field(default_factory=lambda: defaultdict(Usage))

    @property
    def empty(self) -> bool:
        return not self._fallen and not self._used

    def served(self, task: str, wanted: str, used: str, result: GenerateResult, seconds: float, measured: bool = True) -> None:
        """A request of `task` was served by class `used`; its caller waited `seconds`. Unless `measured` it says nothing of what requests take."""
        if used != wanted:
            self._fallen[task, wanted, used] += 1
        if self.measuring and measured and result.finish_reason != "abort":
            self._used[task, used] += usage_of(result, seconds)

    def take(self) -> dict[str, list[list[float | str]]]:
        """The counts as lists, which start anew."""
        message: dict[str, list[list[float | str]]] = {
            "fallen": [[*key, n] for key, n in self._fallen.items()],
            "used": [[*key, *usage.values()] for key, usage in self._used.items()],
        }
        self._fallen.clear()
        self._used.clear()
        return message


def usage_of(result: GenerateResult, seconds: float) -> Usage:
    """One request: the prompt tokens that no cache had, the response's, and the seconds for each. Of an engine that doesn't tell them apart all
    tokens take alike of the `seconds` that its caller waited."""
    prefill, decode = max(result.prompt_tokens - result.cached_tokens, 0), len(result.ids)
    if result.service is not None:
        return Usage(1.0, prefill, decode, result.service.prefill, result.service.decode)
    share = seconds / max(prefill + decode, 1)
    return Usage(1.0, prefill, decode, share * prefill, share * decode)
