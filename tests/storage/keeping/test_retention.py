"""Which versions stay, and why: the pure decision."""

from __future__ import annotations

import pytest

from storage.keeping.lineages import surviving
from storage.keeping.retention import Claims, Retention, kept
from storage.version import Version


def versions(*spelled: str) -> list[Version]:
    return [Version.parse(text) for text in " ".join(spelled).split()]


def decide(retention, existing, *, tags=None, leases=None, parents=None, bases=None):
    tags = {name: Version.parse(text) for name, text in (tags or {}).items()}
    leases = {Version.parse(text): holders for text, holders in (leases or {}).items()}
    parents = {number: Version.parse(text) if text else None for number, text in (parents or {}).items()}
    bases = {Version.parse(one): Version.parse(other) for one, other in (bases or {}).items()}
    found = kept(retention, versions(existing), Claims(tags, leases, parents), bases.get)
    return {str(version): reasons for version, reasons in found.items()}


def test_the_last_k_stay_and_every_nth_and_what_is_within_the_window():
    existing = "0-0 0-1 0-2 0-3 0-4 0-5 0-6 0-7"
    assert list(decide(Retention(), existing)) == ["0-7"]
    assert list(decide(Retention(keep_last=3), existing)) == ["0-5", "0-6", "0-7"]
    assert decide(Retention(keep_every=3), existing) == {
        "0-0": ("every 3 steps",), "0-3": ("every 3 steps",), "0-6": ("every 3 steps",), "0-7": ("newest",),
    }  # fmt: skip
    assert list(decide(Retention(window=2), "0-1 0-4 0-5 0-7")) == ["0-5", "0-7"]
    assert list(decide(Retention(window=0), existing)) == ["0-7"]
    assert list(decide(Retention(keep=frozenset(versions("0-2 0-9"))), existing)) == ["0-2", "0-7"]


def test_tags_and_unexpired_leases_hold_versions_of_abandoned_tails_too():
    found = decide(Retention(), "0-1 0-2 0-3 1-2", parents={1: "0-1"}, tags={"best": "0-3"}, leases={"0-2": ("engine", "")})
    assert found == {"0-2": ("leased by engine", "leased"), "0-3": ("tag best",), "1-2": ("newest",)}


def test_everything_in_the_chain_of_a_kept_version_stays():
    bases = {"0-3": "0-2", "0-2": "0-0", "0-1": "0-0", "0-7": "0-6", "0-9": "0-8"}
    found = decide(Retention(), "0-0 0-1 0-2 0-3 0-4 0-6 0-7", tags={"t": "0-3"}, bases=bases)
    assert found == {
        "0-0": ("0-3 is stored as changes of it",), "0-2": ("0-3 is stored as changes of it",), "0-3": ("tag t",),
        "0-6": ("0-7 is stored as changes of it",), "0-7": ("newest",),
    }  # fmt: skip


def test_a_branch_point_stays_until_its_lineage_has_a_version_and_the_older_newest_with_it():
    opened = decide(Retention(), "0-1 0-2 0-3 0-4", parents={0: None, 1: "0-2"})
    assert opened == {"0-2": ("newest", "lineage 1 begins there"), "0-4": ("newest",)}
    assert list(decide(Retention(), "0-1 0-2 0-3 0-4 1-3", parents={0: None, 1: "0-2"})) == ["1-3"]


def test_the_last_k_go_on_before_the_branch_point_and_leave_the_abandoned_tail_out():
    parents = {1: "0-2", 2: "1-4"}
    existing = "0-1 0-2 0-3 0-4 1-3 1-4 1-5 2-5"
    assert list(decide(Retention(keep_last=4), existing, parents=parents)) == ["0-2", "1-3", "1-4", "2-5"]
    assert list(decide(Retention(keep_every=1), existing, parents=parents)) == ["0-1", "0-2", "1-3", "1-4", "2-5"]
    assert list(decide(Retention(window=2), existing, parents=parents)) == ["1-3", "1-4", "2-5"]


def test_a_lineage_that_was_passed_before_it_had_a_version_holds_nothing():
    assert list(decide(Retention(), "0-1 0-2 2-2", parents={1: "0-2", 2: "0-1"})) == ["2-2"]
    assert list(decide(Retention(), "0-1 0-2 0-3", parents={1: "0-2", 2: "0-1"})) == ["0-1", "0-2", "0-3"]


def test_a_lineage_from_nothing_leaves_the_older_newest():
    assert list(decide(Retention(), "0-1 0-2", parents={1: None})) == ["0-2"]
    assert decide(Retention(), "", parents={0: None}) == {}


def test_what_is_claimed_is_to_be_there_even_if_it_is_not():
    assert list(decide(Retention(), "0-5", tags={"t": "0-1"}, parents={1: "0-3"}, bases={"0-5": "0-4"})) == ["0-1", "0-3", "0-4", "0-5"]


def test_what_is_kept_stays_kept_once_the_rest_is_gone():
    parents = {1: "0-2", 2: "1-4", 3: "0-1"}
    existing = "0-1 0-2 0-3 0-4 1-3 1-4 1-5 2-5"
    retention = Retention(keep_last=2, keep_every=4)
    first = decide(retention, existing, parents=parents, tags={"t": "0-3"})
    assert decide(retention, " ".join(first), parents=parents, tags={"t": "0-3"}) == first


def test_a_lineage_s_path_leads_through_the_branch_points():
    parents = {1: Version(0, 2), 2: Version(1, 4)}
    assert surviving(versions("0-1 0-2 0-3 1-3 1-4 1-5 2-5"), parents, 2) == versions("0-1 0-2 1-3 1-4 2-5")


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_every": 0}, {"window": -1}])
def test_a_retention_that_would_keep_nothing_or_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Retention(**wrong)
