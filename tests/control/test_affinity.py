"""Who serves a stage and who stands in: chains of fallbacks, and which of them may not be."""

from __future__ import annotations

from rollart.control.affinity import AffinityMap, wrong_fallbacks

STAGES = {"train": "trainer", "generate": "h800", "environment": "cpu", "reward": "cpu"}
MAP = AffinityMap(STAGES, {("lake", "generate"): "h20"}, {"h800": "h20", "h20": "l4", "cpu": "spot"}, frozenset({"b200"}))


def test_a_chain_of_stand_ins_is_followed_to_its_end() -> None:
    assert MAP.stand_ins("h800") == ("h20", "l4")
    assert MAP.stand_ins("l4") == MAP.stand_ins("trainer") == ()


def test_a_stage_is_served_by_what_tasks_name_by_what_stands_in_and_by_candidates() -> None:
    assert MAP.serving("generate", ["lake"]) == {"h20", "l4", "b200"}
    assert MAP.serving("generate", ["lake", "sums"]) == {"h800", "h20", "l4", "b200"}
    assert MAP.serving("environment", ["lake"]) == {"cpu", "spot"}
    assert MAP.serving("train", ["lake"]) == {"trainer"}
    assert MAP.used() == {"trainer", "h800", "h20", "l4", "b200", "cpu", "spot"}


def test_a_class_says_what_it_is_for() -> None:
    assert MAP.purposes("cpu") == ["environment", "reward"]
    assert MAP.purposes("h20") == ["lake.generate"]
    assert MAP.purposes("b200") == ["placement"]
    assert MAP.purposes("spot") == ["the fallback of cpu"]


def test_wrong_fallbacks_say_what_is_wrong() -> None:
    classes = ["a", "b", "c", "spare", "trainer"]
    serves = {"a": ["generate"], "b": ["generate", "reward"], "c": ["environment"], "trainer": ["train"]}
    assert wrong_fallbacks({"a": "b", "b": "spare", "c": "spare"}, classes, serves) == {}
    assert wrong_fallbacks({"a": "x"}, classes, serves) == {"a": "no hardware class 'x'; declare hardware.x or use one of " + str(sorted(classes))}
    loop = wrong_fallbacks({"a": "b", "b": "a", "c": "c"}, classes, serves)
    assert {n: t.partition(";")[0] for n, t in loop.items()} == {
        "a": "a -> b -> a comes back to a", "b": "b -> a -> b comes back to b", "c": "c -> c comes back to c",
    }  # fmt: skip
    into_a_loop = wrong_fallbacks({"spare": "a", "a": "b", "b": "a"}, classes, serves)
    assert into_a_loop["spare"].startswith("spare -> a -> b -> a comes back to a")
    assert wrong_fallbacks({"b": "a"}, classes, serves)["b"].startswith("a doesn't serve reward, which b does")
    assert wrong_fallbacks({"trainer": "spare"}, classes, serves)["trainer"].startswith("trainer serves train, whose state stays where it is")
