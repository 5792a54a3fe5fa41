"""A second process that runs the same run: refused while the first is there; once it has taken over, the first comes back and counts for nothing."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from rollart import lease
from rollart.journal import Opened
from storage.objects.store import ObjectStore

ENDLESS = ("train.steps=100000", "evaluate.every=0", "run.lease=2")

pytestmark = pytest.mark.timeout(500)


@pytest.mark.slow
def test_a_coordinator_that_comes_back_after_another_has_taken_over_commits_nothing_and_ends(place: Any) -> None:
    first = place.start("paused", *ENDLESS)
    first.says("training step 3/")
    refused = place.start("paused", *ENDLESS, resume=True)
    assert refused.wait() == 2
    (said,) = refused.heard.splitlines()
    assert said.startswith(f"rollart: {place.run('paused')} is run by process {first.process.pid} on ")

    os.kill(first.process.pid, signal.SIGSTOP)
    store = ObjectStore(str(place.run("paused")))
    while (held := lease.read(store)) is None or held.holds(time.time()):
        time.sleep(0.1)  # it has to be silent for as long as its lease
    reached = place.journal("paused").steps()
    steps = reached + 3
    second = place.start("paused", f"train.steps={steps}", *ENDLESS[1:], resume=True)
    second.says(f"training step {reached + 1}/")
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.wait() == 3, first.heard
    (said,) = [line for line in first.heard.splitlines() if line.startswith("rollart: ")]
    assert f"was taken over by process {second.process.pid} on" in said and "Traceback" not in first.heard
    assert first.left(20.0) == []
    assert second.wait() == 0, second.heard
    assert second.left() == []

    journal = place.journal("paused")
    opened = [n for n in journal.numbers() if isinstance(journal.read(n), Opened)]
    counted = journal.batches()
    assert opened[0] == 0 and len(opened) == 2
    assert [b.step for b in counted] == list(range(steps))
    assert {(b.coordinator, b.lineage) for b in counted if b.step >= reached} == {(opened[1], 1)}
    nonces = [nonce for batch in counted for _, nonce, fate in batch.fates if fate in ("trained", "no_signal")]
    assert len(set(nonces)) == len(nonces)
    table = place.trajectories("paused")
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(["task", "episode", "member"]).any()
    assert sorted(trained["nonce"]) == sorted(nonces)
    lines = place.metrics("paused", "step")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [line["version"] for line in lines][reached:] == [f"1-{n + 1}" for n in range(reached, steps)]
    assert [line["state"] for line in place.metrics("paused", "end")] == ["done"]
    assert str(place.weights("paused").newest()) == f"1-{steps}"
