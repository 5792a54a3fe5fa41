"""What of the configuration says where work goes, in the form that those need who send it. Decides and sends nothing."""

from __future__ import annotations

from rollart.config import Config
from rollart.control.affinity import Stage
from rollart.control.placement import EngineClass, Placement
from rollart.engines.router import StandIns
from rollart.rollout.placing import Places, PlacingPlan
from rollart.rollout.routing import RoutingPlan


def usage_topic(run: str, lineage: int) -> str:
    """Where on the scheduler the workers of a run tell what their requests took, and where they went."""
    return f"usage-{run}-{lineage}"


def routing_plan(config: Config, run: str, lineage: int) -> RoutingPlan:
    """What environment workers know of classes with engines: who stands in for whom, and when one is full."""
    hardware = config.hardware
    stand_ins = {}
    for name in config.affinity.serving("generate", [t.name for t in config.tasks]):
        others = config.affinity.stand_ins(name)
        room = {hardware[c].resource: float(config.engine.slots + hardware[c].queue) for c in (name, *others)} if others else {}
        stand_ins[hardware[name].resource] = StandIns(tuple(hardware[c].resource for c in others), room)
    return RoutingPlan(stand_ins, usage_topic(run, lineage), config.placement.rule == "measured")


def places(config: Config) -> Places:
    """Where the tasks' attempts run: the declared classes, and those that stand in."""

    def chain(stage: Stage, task: str) -> tuple[str, ...]:
        name = config.affinity.hardware_class(stage, task)
        return tuple(config.hardware[c].resource for c in (name, *config.affinity.stand_ins(name)))

    return Places({t.name: (chain("environment", t.name), chain("reward", t.name) if t.scored_apart else None) for t in config.tasks})


def placing_plan(config: Config, run: str, lineage: int) -> PlacingPlan:
    """What the control side knows of where work may go, and what decides about it."""
    names = [t.name for t in config.tasks]
    wanted = {t: config.affinity.hardware_class("generate", t) for t in names}
    classes = sorted(config.affinity.serving("generate", names))
    engines = {c: EngineClass(0, config.engine.slots, config.hardware[c].price_per_hour) for c in classes}
    placement = None
    if config.placement.rule == "measured":
        players = config.affinity.serving("environment", names)
        open_requests = sum(config.hardware[c].slots * config.hardware[c].workers for c in players)
        placement = Placement(dict(wanted), config.placement_rule, open_requests)
    resources = {h.resource: name for name, h in config.hardware.items()}
    return PlacingPlan(usage_topic(run, lineage), resources, wanted, engines, placement)
