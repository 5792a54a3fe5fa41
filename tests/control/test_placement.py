"""Which class generates for which task, by hand-made measurements: predictions, the best map, hysteresis, exploring, classes that vanish."""

from __future__ import annotations

import pytest

from rollart.control import placement as module
from rollart.control.placement import Decision, EngineClass, Placement, PlacementRule, Prediction, Usage

FLEET = {"h800": EngineClass(1, 10), "h20": EngineClass(2, 10)}
"""Compute and bandwidth: the one prefills five times as fast, of the other there are two engines for the same money."""

PACE = {"h800": (0.001, 0.02), "h20": (0.005, 0.02)}
"""Seconds a token, prefilled and decoded, of one place."""


def usage(name: str, requests: float, prefill: float, decode: float) -> Usage:
    """`requests` alike, of so many tokens each, at the pace of class `name`."""
    a, b = PACE[name]
    return Usage(requests, requests * prefill, requests * decode, requests * prefill * a, requests * decode * b)


DEFAULT = PlacementRule()
READS = (4000, 20)
WRITES = (100, 500)


def known(rule: PlacementRule = DEFAULT, classes: dict[str, str] | None = None, **more: float) -> Placement:
    """A step of 20 requests that read and 20 that write, known at both classes; all on h20 at first."""
    made = Placement(classes or {"reader": "h20", "writer": "h20"}, rule, **more)
    for task, tokens in (("reader", READS), ("writer", WRITES)):
        made.used(task, made.classes[task], usage(made.classes[task], 20, *tokens))
    made.stepped()
    for task, tokens in (("reader", READS), ("writer", WRITES)):
        for name in FLEET:
            made.used(task, name, usage(name, 50, *tokens))
    made._now.clear()  # what was tried for the test's sake is no load
    return made


def decide(found: Placement, fleet: dict[str, EngineClass] = FLEET) -> Decision:
    """A decision after news that change nothing."""
    found.used("reader", "h20", Usage())
    return found.decide(fleet)


def test_a_steps_time_is_that_of_the_fullest_class() -> None:
    # reader: 4000 * .001 + 20 * .02 = 4.4 s at h800, 20.4 s at h20; writer: 10.1 s at h800, 10.5 s at h20; 20 requests each.
    found = known()
    assert found.predict({"reader": "h800", "writer": "h20"}, FLEET).seconds == pytest.approx(max(20 * 4.4 / 10, 20 * 10.5 / 20))
    assert found.predict({"reader": "h20", "writer": "h20"}, FLEET).seconds == pytest.approx(20 * (20.4 + 10.5) / 20)
    assert found.predict({"reader": "h800", "writer": "h800"}, FLEET).seconds == pytest.approx(20 * (4.4 + 10.1) / 10)


def test_where_places_are_left_over_the_requests_that_may_be_open_bound_a_step() -> None:
    found = known(open_requests=5)
    assert found.predict({"reader": "h800", "writer": "h20"}, FLEET).seconds == pytest.approx(20 * (4.4 + 10.5) / 5)


def test_a_price_counts_by_engine_seconds_to_the_power_of_its_weight() -> None:
    priced = {"h800": EngineClass(1, 10, 3.0), "h20": EngineClass(2, 10, 1.0)}
    apart = {"reader": "h800", "writer": "h20"}
    cost = 3.0 * 20 * 4.4 / 10 + 1.0 * 20 * 10.5 / 10
    for weight in (0.0, 0.5, 1.0):
        found = known(PlacementRule(price_weight=weight)).predict(apart, priced)
        assert found == Prediction(pytest.approx(10.5), pytest.approx(cost / 3600), pytest.approx(10.5 * cost**weight))  # type: ignore[arg-type]
    assert known().predict(apart, {**priced, "h20": EngineClass(2, 10)}).score == pytest.approx(10.5)  # one has no price


def test_what_reads_goes_to_the_compute_class_and_what_writes_to_the_bandwidth_class() -> None:
    found = known(PlacementRule(patience=1)).decide(FLEET)
    assert found.classes == {"reader": "h800", "writer": "h20"} and found.moved == (("reader", "h20", "h800"),)
    assert (found.step_s, found.before_s) == (pytest.approx(10.5), pytest.approx(30.9))
    assert found.why == "a step should take 10.5 s and not 30.9 s" and found.explore == {}
    priced = known(PlacementRule(patience=1)).decide({"h800": EngineClass(1, 10, 3.0), "h20": EngineClass(2, 10, 1.0)})
    share = (3.0 * 20 * 4.4 + 20 * 10.5) / (20 * 20.4 + 20 * 10.5)
    assert priced.why == f"a step should take 10.5 s and not 30.9 s for {share:.3g} of its price"


def test_a_map_has_to_be_better_so_many_times_in_a_row() -> None:
    found = known(PlacementRule(patience=3))
    assert [decide(found).moved for _ in range(2)] == [(), ()]
    worse = {**FLEET, "h800": EngineClass(1, 2)}  # for once, all that it could take would wait there
    assert decide(found, worse).moved == ()
    told = [decide(found) for _ in range(3)]
    assert [bool(d.moved) for d in told] == [False, False, True]
    assert "2 of 3 times" in told[1].why and found.decide(FLEET).why == "no map is better"


def test_the_same_figures_are_no_evidence_twice() -> None:
    found = known(PlacementRule(patience=2))
    assert [found.decide(FLEET).moved for _ in range(3)] == [(), (), ()]
    assert decide(found).moved != ()


def test_where_steps_are_shorter_than_what_is_told_of_them_each_has_its_part() -> None:
    found = Placement({"t": "h20"})
    for _ in range(3):
        found.stepped()
    found.used("t", "h20", usage("h20", 20, 100, 10))
    found.stepped()
    assert found.loads["t"].requests == pytest.approx(20 / 4)
    found.stepped()
    assert found.loads["t"].requests == pytest.approx(20 / 4)
    found.used("t", "h20", usage("h20", 20, 100, 10))
    found.stepped()
    assert found.loads["t"].requests == pytest.approx((20 / 4 + 20 / 2) / 2)


def test_two_better_maps_in_turns_do_not_add_up_to_one() -> None:
    found = known(PlacementRule(patience=2))
    other = {"h800": EngineClass(4, 10), "h20": EngineClass(1, 10)}  # where all should go to h800
    told = [decide(found, fleet) for fleet in (FLEET, other, FLEET, other, other)]
    assert [d.classes["writer"] for d in told] == ["h20"] * 4 + ["h800"]
    assert [d.classes["reader"] for d in told] == ["h20"] * 4 + ["h800"]


def test_a_gain_that_is_not_over_the_threshold_changes_nothing() -> None:
    gain = 30.9 / 10.5 - 1
    assert known(PlacementRule(gain=gain + 0.01, patience=1)).decide(FLEET).moved == ()
    assert known(PlacementRule(gain=gain - 0.01, patience=1)).decide(FLEET).moved != ()


def test_nothing_moves_to_where_it_has_not_been_measured_and_that_is_what_is_explored() -> None:
    found = Placement({"reader": "h20", "writer": "h20"}, PlacementRule(patience=1, explore=16))
    assert found.explore(FLEET) == {"reader": "h800", "writer": "h800"}  # in the fleet's order
    for task, tokens in (("reader", READS), ("writer", WRITES)):
        found.used(task, "h20", usage("h20", 20, *tokens))
    found.used("reader", "h800", usage("h800", 15, *READS))
    found.stepped()
    assert found.explore(FLEET) == {"reader": "h800", "writer": "h800"}
    assert found.decide(FLEET).moved == ()
    found.used("reader", "h800", usage("h800", 1, *READS))
    told = found.decide(FLEET)
    assert told.explore == {"writer": "h800"} and told.classes == {"reader": "h800", "writer": "h20"}


def test_before_a_whole_step_has_been_seen_nothing_moves() -> None:
    found = Placement({"reader": "h20"}, PlacementRule(patience=1, explore=1))
    for name in FLEET:
        found.used("reader", name, usage(name, 20, *READS))
    assert found.decide(FLEET).why == "not every task has been measured where it is"
    found.stepped()
    assert found.decide(FLEET).classes == {"reader": "h800"}


def test_a_class_that_vanishes_is_left_at_once_and_may_be_chosen_again_when_it_is_back() -> None:
    found = known(PlacementRule(patience=2), {"reader": "h800", "writer": "h20"})
    told = found.decide({"h20": FLEET["h20"], "h800": EngineClass(0, 10)})
    assert told.classes == {"reader": "h20", "writer": "h20"} and told.moved == (("reader", "h800", "h20"),)
    assert told.why == "h800 has no engine any more" and told.step_s == pytest.approx(30.9)
    assert found.decide({"h20": FLEET["h20"]}).why == "no map is better"
    assert [decide(found).classes["reader"] for _ in range(2)] == ["h20", "h800"]


def test_the_load_of_a_step_follows_the_last_ones_and_the_pace_the_last_requests() -> None:
    found = Placement({"t": "h20"})
    for requests in (10, 20):
        found.used("t", "h20", usage("h20", requests, 100, 10))
        found.stepped()
    found.used("other", "h20", usage("h20", 1, 100, 10))
    found.stepped()  # in which nothing of it ended
    assert found.loads["t"].requests == pytest.approx(((10 + 20) / 2 + 0) / 2)
    for _ in range(30):
        found.used("t", "h20", Usage(100, 100, 100, 100 * 0.5, 100 * 0.25))
    paced = found.measured["t", "h20"]
    assert paced.requests == module.RECENT
    assert paced.seconds(Usage(1, 1, 0)) == pytest.approx(0.5, rel=0.05) and paced.seconds(Usage(1, 0, 1)) == pytest.approx(0.25, rel=0.05)


def test_what_a_class_took_long_ago_is_forgotten_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESHED", 3)
    found = Placement({"t": "h20"})
    found.used("t", "h800", usage("h800", 20, *READS))
    for _ in range(3):
        found.used("t", "h20", usage("h20", 20, *READS))
        found.stepped()
    assert found.explore(FLEET) == {} and found.paces() == {"t": {"h800": pytest.approx(PACE["h800"]), "h20": pytest.approx(PACE["h20"])}}
    found.used("t", "h20", usage("h20", 20, *READS))
    found.stepped()
    assert found.explore(FLEET) == {"t": "h800"} and set(found.paces()["t"]) == {"h20"}


def test_many_maps_are_searched_one_move_at_a_time_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def placed() -> Placement:
        found = Placement({f"{kind}{i}": "h20" for kind in "rw" for i in range(3)}, PlacementRule(patience=1))
        for task in found.classes:
            tokens = READS if task.startswith("r") else WRITES
            found.used(task, "h20", usage("h20", 20, *tokens))
        found.stepped()
        for task in found.classes:
            for name in FLEET:
                found.used(task, name, usage(name, 50, *(READS if task.startswith("r") else WRITES)))
        return found

    all_tried = placed().decide(FLEET)
    monkeypatch.setattr(module, "ENUMERATED", 1)
    searched = placed().decide(FLEET)
    assert searched.classes == all_tried.classes == {f"r{i}": "h800" for i in range(3)} | {f"w{i}": "h20" for i in range(3)}


def test_a_rule_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="price_weight within"):
        PlacementRule(price_weight=1.5)
