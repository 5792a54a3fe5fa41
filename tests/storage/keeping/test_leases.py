"""Leases: who holds what, until when, by the store's clock."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from storage.errors import LeaseExpired, StoreUnreachable, VersionMissing
from storage.format import layout
from storage.keeping import leases
from storage.keeping.leases import SWEPT_AFTER_S, Leases
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.scripted import Script, ScriptedStore, put

V0 = Version(0, 0)


@pytest.fixture
def script():
    return Script(now=1000.0)


@pytest.fixture
def weights(place, script):
    weights = WeightStore.over(ScriptedStore.over(place, script))
    put(weights, V0)
    return weights


def test_a_lease_is_held_inside_of_with_and_ends_its_seconds_after_the_store_wrote_it(weights):
    with weights.lease(V0, 60, "engine 7") as lease:
        (held,) = Leases(weights.objects).all()
        assert (held.version, held.holder, held.expires) == (V0, "engine 7", 1060.0)
        assert lease.version == V0
    assert Leases(weights.objects).all() == []


def test_a_lease_that_cannot_be_given_back_is_logged_and_leaves_the_block_as_it_ended(weights, script, caplog):
    def unreachable(kind, path):
        raise StoreUnreachable("no way there")

    with weights.lease(V0, 60):
        script.before = unreachable
    with pytest.raises(KeyError, match="the block's own"):
        script.before = None
        with weights.lease(V0, 60):
            script.before = unreachable
            raise KeyError("the block's own")
    said = [record.getMessage() for record in caplog.records if record.name == leases.__name__]
    assert len(said) == 2 and all("0-0" in line and "after 60 s" in line and "no way there" in line for line in said)


def test_renewing_starts_the_seconds_anew(weights, script):
    lease = weights.lease(V0, 60)
    script.now = 1050.0
    lease.renew()
    assert [held.expires for held in Leases(weights.objects).all()] == [1110.0]
    lease.release()
    lease.release()


def test_renewing_too_late_by_the_holder_s_own_count_is_an_error_and_ends_the_lease(weights, monkeypatch):
    lease = weights.lease(V0, 60)
    late = time.monotonic() + 61
    monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda: late))
    with pytest.raises(LeaseExpired, match="60 s"):
        lease.renew()
    assert Leases(weights.objects).all() == []


def test_a_version_that_is_not_there_can_be_leased_and_renewed_by_nobody(weights):
    with pytest.raises(VersionMissing, match="0-5"):
        weights.lease("0-5", 60)
    lease = weights.lease(V0, 60)
    weights.objects.delete(layout.commit_path(V0))
    with pytest.raises(VersionMissing, match="0-0"):
        lease.renew()
    assert Leases(weights.objects).all() == []


def test_two_leases_of_one_version_are_two(weights):
    with weights.lease(V0, 60):
        with weights.lease(V0, 60):
            assert len(Leases(weights.objects).all()) == 2
        assert len(Leases(weights.objects).all()) == 1


def test_ended_leases_are_swept_and_others_are_not(weights):
    weights.lease(V0, 60)
    kept = weights.lease(V0, 600)
    found = Leases(weights.objects)
    assert found.sweep(1060.0 + SWEPT_AFTER_S - 1) == []
    assert len(found.sweep(1060.0 + SWEPT_AFTER_S)) == 1
    assert [held.expires for held in found.all()] == [1600.0]
    kept.renew()


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_lease_needs_a_time(weights, seconds):
    with pytest.raises(ValueError, match="some seconds"):
        weights.lease(V0, seconds)


def test_a_holder_of_any_text_leaves_a_record_that_is_read(weights):
    with weights.lease(V0, 60, "host\udcff"):
        assert [held.holder for held in Leases(weights.objects).all()] == ["host\\udcff"]
