"""Classes that stand in for others, and placement by measuring, from the configuration to what those get who send work."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.config import Config, ConfigError, changed_fields, parse
from rollart.control.placement import EngineClass, PlacementRule
from rollart.engines.router import StandIns
from rollart.opening import _resources
from rollart.routes import places, placing_plan, routing_plan

QUICKSTART = (Path(__file__).parent.parent / "flows" / "configs" / "quickstart.yaml").read_text()
SPARE = "hardware.spare={resource: SPARE, queue: 5, price_per_hour: 2, slots: 3}"


def configured(*overrides: str) -> Config:
    return parse(QUICKSTART, [SPARE, *overrides])


def engine_class(config: Config) -> str:
    return config.stages["generate"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware.player.fallback=nobody"], "hardware.player.fallback: no hardware class 'nobody'; declare hardware.nobody"),
        (
            ["hardware.player.fallback=spare", "hardware.spare.fallback=player"],
            "fallback: player -> spare -> player comes back to player",
        ),
        (["hardware.trainer.fallback=spare"], "hardware.trainer.fallback: trainer serves train, whose state stays where it is"),
        (["hardware.player.fallback=engine"], "hardware.player.fallback: engine doesn't serve environment"),
        (["placement.classes=[nobody]", "placement.rule=measured"], "placement.classes: no hardware class 'nobody'"),
        (["placement.rule=measured"], "placement.rule: measured needs two classes with engines to choose from"),
        (["placement.classes=[spare]"], "placement.classes: only placement.rule measured uses them"),
        (["placement.price_weight=2"], "placement.price_weight: input should be less than or equal to 1"),
    ],
)
def test_what_can_not_stand_in_is_refused_by_the_fields_path(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(*overrides)
    assert message in str(refused.value)


def test_a_stand_in_is_set_up_for_what_it_stands_in_for_and_no_other_class_is() -> None:
    config = configured("hardware.engine.fallback=spare", "hardware.engine.queue=7", "engine.slots=10")
    assert _resources(config, "generate") == {config.hardware["engine"].resource, "SPARE"}
    assert "SPARE" not in _resources(config, "environment")
    plan = routing_plan(config, "r", 0)
    assert plan.stand_ins[config.hardware["engine"].resource] == StandIns(("SPARE",), {config.hardware["engine"].resource: 17.0, "SPARE": 15.0})
    assert plan.stand_ins["SPARE"] == StandIns() and not plan.measuring
    assert placing_plan(config, "r", 0).placement is None


def test_environments_and_rewards_have_their_chains() -> None:
    config = configured("hardware.player.fallback=spare")
    player = config.hardware["player"].resource
    for task, (environment, reward) in places(config).chains.items():
        assert environment == (player, "SPARE")
        assert (reward is not None) == config.task(task).scored_apart
    assert places(configured())["guess_number"][0] == player


def test_placement_begins_with_the_declared_map_among_the_classes_that_have_engines() -> None:
    config = configured("placement={rule: measured, classes: [spare], gain: 0.2, patience: 2, explore: 9, price_weight: 0}", "engine.slots=10")
    plan = placing_plan(config, "r", 3)
    assert plan.engines == {"engine": EngineClass(0, 10, config.hardware["engine"].price_per_hour), "spare": EngineClass(0, 10, 2.0)}
    assert plan.placement is not None and plan.placement.rule == PlacementRule(0.2, 2, 9, 0.0)
    assert plan.placement.classes == plan.wanted == dict.fromkeys((t.name for t in config.tasks), "engine")
    assert plan.placement.open_requests == config.hardware["player"].slots
    routing = routing_plan(config, "r", 3)
    assert routing.measuring and routing.topic == plan.topic == "usage-r-3"


def test_a_resumed_run_may_have_other_stand_ins_and_another_placement() -> None:
    assert changed_fields(parse(QUICKSTART), configured("hardware.player.fallback=spare")) == []
    assert changed_fields(parse(QUICKSTART), configured("placement={rule: measured, classes: [spare]}")) == []
