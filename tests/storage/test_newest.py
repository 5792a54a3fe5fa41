"""Pulls of the newest version beside collectors that leave it little time."""

from __future__ import annotations

import logging

import pytest
import torch

from storage.errors import Damaged, VersionMissing
from storage.format import layout
from storage.keeping.retention import Retention
from storage.version import Version
from storage.weights import WeightStore


def v(step: int) -> Version:
    return Version(0, step)


def publish(weights: WeightStore, step: int) -> None:
    weights.publish({"w": torch.full((300,), float(step))}, version=v(step), background=False)


@pytest.fixture
def passed(place, monkeypatch):
    """A store with 0-0, where each of the first `passed.times` reads of what `passed.where` begins sees that version collected first."""

    class Passed:
        times, where, method = 1, layout.COMMITS, "read"
        step = 0
        weights = WeightStore(*place)

        def pull(self, ref, **how):
            kind = type(self.weights.objects)
            original = getattr(kind, self.method)
            busy = []

            def read(store, path, *args, **kwargs):
                if not busy and self.times and (path.startswith(self.where) or self.method == "read_into"):
                    busy.append(True)
                    self.times -= 1
                    self.step += 1
                    publish(WeightStore(*place), self.step)
                    for _ in range(2):
                        WeightStore(*place).gc(Retention(), grace_s=0, now=1e10)
                    busy.clear()
                return original(store, path, *args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(kind, self.method, read)
                return self.weights.pull(ref, **how)

    publish(Passed.weights, 0)
    return Passed()


@pytest.mark.parametrize("ref", [None, "newest"])
@pytest.mark.parametrize("method", ["read", "read_into"])
def test_a_newest_version_that_is_collected_meanwhile_is_looked_up_again(passed, ref, method, caplog):
    passed.times, passed.method = 3, method
    out = torch.zeros(300)
    with caplog.at_level(logging.WARNING, "storage.weights"):
        found = passed.pull(ref, names=iter(["w"]), out={"w": out})
    assert found["w"] is out and out.tolist() == [3.0] * 300
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == [f"attempt {n} of 4 follows" for n in (2, 3, 4)]


def test_it_is_looked_up_a_few_times_only(passed):
    passed.times = 4
    with pytest.raises(VersionMissing, match="0-3"):
        passed.pull(None)


def test_a_version_that_is_asked_for_by_its_number_is_not_replaced(passed):
    with pytest.raises(VersionMissing, match="0-0"):
        passed.pull("0-0")


def test_a_newest_version_that_is_damaged_is_not_tried_again(place, monkeypatch):
    weights = WeightStore(*place)
    publish(weights, 0)
    weights.objects.delete(f"{layout.data_prefix(v(0), weights.commit(v(0)).attempt)}/float32/c/0")
    looks = []
    resolve = weights._versioned.resolve
    monkeypatch.setattr(weights._versioned, "resolve", lambda ref: looks.append(ref) or resolve(ref))
    with pytest.raises(Damaged, match="is missing"):
        weights.pull()
    assert looks == [None]
