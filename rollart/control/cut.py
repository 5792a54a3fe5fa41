"""What of the ledger is kept: where members ended, and the state that a resumed run goes on from. Plain data that goes through JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollart.control.groups import OpenGroup
from rollart.control.tallies import Tally
from rollart.types import Attempt

Fate = Literal["trained", "no_signal", "too_long", "failed", "group_short", "over_age", "too_stale", "spare", "lineage"]
"""Where a member ended: trained on; its group's scores were all equal; too many of its group ran over their token budget; its attempts ran
out; its group fell below `min_members`; stopped at a turn since it had outlived the window; outlived it before a batch took it; its group
had enough without it; sampled by an abandoned lineage."""


@dataclass(slots=True)
class LedgerCut:
    """All that a resumed run needs of the ledger, as plain data: counters, open groups, fates so far and which of them no settlement holds.

    `entry` is the number of the last entry of the run's ledger that is in it.
    """

    lineage: int
    next_step: int
    next_index: dict[str, int]
    open: list[OpenGroup]
    tallies: dict[str, dict[str, Tally]]
    late: int
    unsettled: list[tuple[Attempt, str, Fate]] = field(default_factory=list)
    entry: int = -1
    ends: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Settlement:
    """What became of members since the last one, as (attempt, nonce, fate); one is committed with every batch."""

    fates: list[tuple[Attempt, str, Fate]] = field(default_factory=list)
