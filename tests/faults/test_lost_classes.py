"""Every worker of a hardware class dies for good in the middle of a run: what the configuration names in its place takes over."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dask_cluster import DaskCluster

STEPS = 24
"""Some seconds' worth: the workers tell once a second where requests went."""

CLASSES = (
    "hardware.other={resource: OTHER}", "hardware.engine.fallback=other", "hardware.spare={resource: SPARE, slots: 48}",
    "hardware.player.fallback=spare", f"train.steps={STEPS}", "evaluate.every=0", "evaluate.episodes=6",
    f"train.max_skipped={STEPS}",
)  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaskCluster]:
    made = DaskCluster(tmp_path)
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_engines_and_environments_whose_class_is_gone_are_stood_in_for_and_that_is_counted(place: Any, cluster: DaskCluster) -> None:
    for name, resources in {"train": ["TRAIN=1", "REWARD=4"], "generate": ["GENERATE=1"], "play": ["ENVIRONMENT=48"]}.items():
        cluster.worker(*resources, name=name)
    cluster.worker("OTHER=1", "SPARE=48", name="spare")
    cluster.wait_for(4)
    running = place.start("gone", f"run.scheduler={cluster.address}", *CLASSES)
    running.says("training step 1/")
    for name in ("generate", "play"):
        lost = cluster.workers.pop(name)
        os.killpg(lost.pid, signal.SIGKILL)  # with its nanny: nothing starts it again
        lost.wait()
    assert running.wait() == 0, running.heard
    assert [line["step"] for line in place.metrics("gone", "step")] == list(range(1, STEPS + 1))
    stood_in: Counter[tuple[str, str, str]] = Counter()
    for line in place.metrics("gone", "step"):
        for entry in line.get("fallbacks", ()):
            stood_in[entry["stage"], entry["wanted"], entry["used"]] += entry["count"]
    assert set(stood_in) == {("generate", "engine", "other"), ("environment", "player", "spare")}
    assert all(count > 20 for count in stood_in.values())
    for task in ("guess_number", "chain_sum"):
        assert running.heard.count(f"other stands in for engine, which is full or gone, in generate of {task}") == 1
        assert running.heard.count(f"spare stands in for player, which is full or gone, in environment of {task}") == 1
    assert "served by a stand-in" in running.printed
