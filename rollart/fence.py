"""Tells a run's coordinators apart wherever one of them is heard: by their numbers in the run's ledger, of which a later one is higher.

One check a side: a worker's plugin is of one coordinator and hears no other, and the scheduler lets no earlier one set workers up, nor that of
another run while one is open: a worker has one plugin of a kind, and a number says nothing of the run.
"""

from __future__ import annotations

from distributed import Scheduler

from rollart.config import ConfigError

CLAIMS = "rollart-coordinators"
"""Where the scheduler keeps, by run, the highest coordinator number that has set workers up, and the id of that one's client."""


class SchedulerInUse(ConfigError):
    """Another run is open on the scheduler."""


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


def claim(run: str, number: int, client: str, dask_scheduler: Scheduler) -> None:
    """Has the scheduler, on which this runs, keep `number` and the id of its `client` for the run at `run`. Superseded if a later one is there,
    SchedulerInUse if the client of another run is."""
    claims: dict[str, tuple[int, str]] = dask_scheduler.task_metadata.setdefault(CLAIMS, {})
    for other, (_, by) in claims.items():
        if other != run and by in dask_scheduler.clients:
            raise SchedulerInUse(
                f"run.scheduler: {other} is open on this scheduler, and a run sets up all of its workers; wait until that one has ended, or start "
                "another scheduler with workers of its own"
            )
    highest, _ = claims.get(run, (number, client))
    if highest > number:
        admit(number, highest)
    claims[run] = number, client


def is_newest(run: str, number: int, dask_scheduler: Scheduler) -> bool:
    """Whether no later coordinator of the run at `run` than `number` has set up workers of this scheduler."""
    highest, _ = dask_scheduler.task_metadata.get(CLAIMS, {}).get(run, (number, ""))
    return bool(highest <= number)
