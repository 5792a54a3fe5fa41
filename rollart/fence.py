"""Tells a run's coordinators apart wherever one of them is heard: by their numbers in the run's ledger, of which a later one is higher.

One check a side: a worker's plugin is of one coordinator and hears no other, and the scheduler lets no earlier one set workers up.
"""

from __future__ import annotations

from distributed import Scheduler

CLAIMS = "rollart-coordinators"
"""Where the scheduler keeps, by run, the highest coordinator number that has set workers up."""


class Superseded(RuntimeError):
    """A coordinator speaks to what another coordinator of its run has set up."""


def admit(told: int, own: int) -> None:
    """Superseded, which names both numbers, unless `told`, the coordinator that speaks, is `own`, the one that the hearer belongs to."""
    if told < own:
        raise Superseded(
            f"coordinator {told} of this run is superseded by coordinator {own}: another process has taken the run over, and this one ends"
        )
    if told > own:
        raise Superseded(f"this worker was set up by coordinator {own}, before coordinator {told} took the run over; go on with --resume")


def claim(run: str, number: int, dask_scheduler: Scheduler) -> None:
    """Has the scheduler, on which this runs, keep `number` for the run at `run`. Superseded if a later one is there."""
    claims = dask_scheduler.task_metadata.setdefault(CLAIMS, {})
    if claims.get(run, number) > number:
        admit(number, claims[run])
    claims[run] = number


def is_newest(run: str, number: int, dask_scheduler: Scheduler) -> bool:
    """Whether no later coordinator of the run at `run` than `number` has set up workers of this scheduler."""
    return bool(dask_scheduler.task_metadata.get(CLAIMS, {}).get(run, number) <= number)
