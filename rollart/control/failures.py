"""What a failure costs: which tries a member has, how long it rests between them, and when its silence counts as one. Decides, times nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Cause = Literal["environment", "reward", "generation", "machine", "lease"]
"""Whose failure ended an attempt: the environment's; the verifier's; the engines'; that of a worker, a store or the network; or nobody said
anything until the lease ended. What the policy's own action caused is none of these: it is scored."""

OF_THE_TASK: tuple[Cause, ...] = ("environment", "reward", "lease")
"""They would go the same way again and again, and count against the member's few attempts."""

OF_THE_MACHINE: tuple[Cause, ...] = ("generation", "machine")
"""One of them may take hundreds of attempts with it that did nothing wrong: they count against a larger number."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """`attempts`, `machine_attempts`: tries at a member that failures of the task, and of the machine, may cost before it is given up.

    `lease_s`: seconds after which a silent attempt counts as failed. A member rests `rest_s` seconds after its first failure,
    `rest_factor` times as long after each further one, `most_rest_s` at most. `batches`: so many batches' worth of a task's groups in a row
    may be filtered out before there is no hope for it.
    """

    attempts: int = 3
    lease_s: float = 600.0
    batches: int = 10
    machine_attempts: int = 10
    rest_s: float = 0.0
    rest_factor: float = 2.0
    most_rest_s: float = 60.0

    def gives_up(self, failures: Mapping[Cause, int]) -> bool:
        """Whether a member that has failed that often, by cause, is not tried again."""
        own, machine = (sum(failures.get(cause, 0) for cause in causes) for causes in (OF_THE_TASK, OF_THE_MACHINE))
        return own >= self.attempts or machine >= self.machine_attempts

    def rest(self, failures: Mapping[Cause, int]) -> float:
        """Seconds until a member that has failed that often is tried again."""
        count = sum(failures.values())
        if count < 1:
            return 0.0
        return min(self.most_rest_s, self.rest_s * self.rest_factor ** min(count - 1, 64))
