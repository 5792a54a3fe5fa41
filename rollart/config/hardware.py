"""The hardware classes, and how tasks are placed on them."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from rollart.config.section import Section


class HardwareClass(Section):
    """A kind of worker: a Dask resource with a price."""

    resource: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="name of the Dask worker resource")
    slots: int = Field(1, ge=1, description="units of the resource a worker process has: how many tasks run there at once")
    workers: int = Field(1, ge=1, description="worker processes that the local cluster starts; of the class that trains: ranks")
    price_per_hour: float = Field(0.0, ge=0, description="price of one worker, in the currency of your choice per hour")
    fallback: str | None = Field(
        None,
        description="the class that stands in for this one: for generation while every engine here is full or there is none, for environments and "
        "rewards while no worker is here",
    )
    memory: ByteSize | None = Field(
        None,
        ge=2**26,
        description="memory that one of the local cluster's worker processes may take (2 GiB): at four fifths it takes no more tasks and is started "
        "anew once those that it has have ended, at 95 % at once; for environments and rewards only; default: no limit",
    )
    queue: int = Field(32, ge=0, description="requests that may wait at an engine of this class, over engine.slots, before it is full for `fallback`")


class PlacementSettings(Section):
    """Which class generates for which task, where that is found out by measuring and not declared for good."""

    rule: Literal["declared", "measured"] = Field(
        "declared",
        description="declared: as `stages` and tasks[].classes say; measured: they say where tasks begin, and tasks move to where the mix is "
        "finished soonest for its price (rollart/control/placement.py)",
    )
    classes: list[str] = Field(
        default_factory=list, description="hardware classes with engines beside those that `stages` and tasks[].classes name for generate"
    )
    gain: float = Field(0.1, ge=0, description="how much better than the map in force another must be, of 1, before tasks move")
    patience: int = Field(3, ge=1, description="decisions (one a step) in a row in which it must be so")
    explore: int = Field(16, ge=1, description="requests of a task that a class serves before it is judged for it")
    price_weight: float = Field(
        0.5, ge=0, le=1, description="what hardware.NAME.price_per_hour counts: 0 nothing, 1 as much as time; without prices it doesn't matter"
    )
