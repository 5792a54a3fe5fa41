"""The router's order of preference: class, then affinity, then load."""

from __future__ import annotations

import pickle

import pytest

from rollart.engines.errors import EngineRefused, EngineUnreachable, NoEngine
from rollart.engines.router import Choice, EngineEntry, EngineTable, StandIns, choose, pick
from storage.version import Version

V = Version(0, 3)
A, B, C = EngineEntry("http://a", "h200", V, 5), EngineEntry("http://b", "h200", V, 2), EngineEntry("http://c", "l4", V, 0)
TABLE = EngineTable((A, B, C), 1)


@pytest.mark.parametrize(
    ("wanted", "affinity", "in_flight", "entry"),
    [
        ("h200", None, {}, B),
        ("h200", "http://a", {"http://a": 90}, A),
        ("h200", "http://gone", {}, B),
        ("h200", "http://c", {}, B),
        ("h200", None, {"http://b": 6}, A),
        ("l4", "http://a", {}, C),
    ],
)
def test_class_comes_before_affinity_and_affinity_before_load(wanted, affinity, in_flight, entry):
    assert pick(TABLE, wanted, affinity, in_flight) == entry


def test_equal_loads_go_to_the_smaller_url_in_any_order_of_the_table():
    twins = (EngineEntry("http://y", "h200", V), EngineEntry("http://x", "h200", V))
    assert pick(EngineTable(twins), "h200", None, {}).url == pick(EngineTable(twins[::-1]), "h200", None, {}).url == "http://x"


def test_another_class_serves_where_the_wanted_has_no_engine_and_that_is_reported():
    assert choose(TABLE, "h800", None, {}) == Choice(C, fell_back=True, affine=False)
    assert choose(TABLE, "h800", "http://a", {}) == Choice(A, fell_back=True, affine=True)
    assert choose(TABLE, "l4", None, {}) == Choice(C, fell_back=False, affine=False)


D = EngineEntry("http://d", "t4", V)
WIDE = EngineTable((A, B, C, D), 1)
ROOM = StandIns(("l4", "t4"), {"h200": 3, "l4": 1})


@pytest.mark.parametrize(
    ("in_flight", "affinity", "entry"),
    [
        ({"http://a": 4, "http://b": 3}, None, B),  # one has room
        ({"http://a": 4, "http://b": 4}, None, C),  # all are over it
        ({"http://a": 4, "http://b": 4}, "http://a", A),  # but they keep what has its prefix there
        ({"http://a": 4, "http://b": 4, "http://c": 2}, None, D),  # and so on down the chain
        ({"http://a": 4, "http://b": 3, "http://c": 0}, "http://c", B),  # what fell back returns once there is room
        ({"http://a": 4, "http://b": 4, "http://c": 2, "http://d": 99}, None, D),  # which has no bound
    ],
)
def test_a_full_class_lets_its_stand_ins_serve_what_has_no_prefix_there(in_flight, affinity, entry):
    found = choose(WIDE, "h200", affinity, in_flight, stand_ins=ROOM)
    assert found == Choice(entry, entry.hardware_class != "h200", affine=entry.url == affinity)


def test_where_all_are_full_a_request_waits_at_the_class_that_it_wants():
    full = {"http://a": 4, "http://b": 9, "http://c": 2}
    assert choose(TABLE, "h200", None, full, stand_ins=StandIns(("l4",), {"h200": 3, "l4": 1})).entry == A
    assert choose(TABLE, "h200", None, full, stand_ins=StandIns((), {"h200": 3})).entry == A


def test_a_class_that_is_gone_is_stood_in_for_in_the_declared_order_and_at_last_by_any():
    assert choose(WIDE, "h800", None, {}, stand_ins=StandIns(("t4", "l4"))) == Choice(D, fell_back=True, affine=False)
    assert choose(TABLE, "h800", None, {}, stand_ins=StandIns(("t4", "l4"))) == Choice(C, fell_back=True, affine=False)
    assert choose(EngineTable((A, B)), "h800", None, {}, stand_ins=StandIns(("t4", "l4"))).entry == B


def test_no_engine_names_the_class_and_what_there_is():
    with pytest.raises(NoEngine, match="'h800': there are engines of h200, l4"):
        choose(TABLE, "h800", None, {}, fall_back=False)
    with pytest.raises(NoEngine, match="'h800': the table is empty"):
        pick(EngineTable(), "h800", None, {})


@pytest.mark.parametrize("error", [NoEngine("h800", ("l4",)), EngineRefused("http://a", 400, "no"), EngineUnreachable("http://a", "gone")])
def test_errors_survive_the_way_through_dask(error):
    back = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert (type(back), str(back), back.__dict__) == (type(error), str(error), error.__dict__)
