"""Processes that die in the middle of a run: it goes on without being asked, and loses nothing but time."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from tests.conftest import GONE_S

STEPS = 6

pytestmark = pytest.mark.timeout(400)


def is_engine(command: str) -> bool:
    return "rollart.engines.embedded" in command


def assert_ended_whole(place: Any, name: str, running: Any) -> None:
    """Every step was taken once, on whole batches inside the window, and nothing was given up."""
    assert running.wait() == 0, running.heard
    assert running.left() == []
    assert [line["step"] for line in place.metrics(name, "step")] == list(range(1, STEPS + 1))
    assert [str(v) for v in place.weights(name).versions()] == [f"0-{n}" for n in range(STEPS + 1)]
    table = place.trajectories(name)
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(["task", "episode", "member"]).any()
    assert (trained.groupby("version").size() == 4 * 4 + 2 * 3).all()
    assert trained["staleness"].between(0, 1).all()
    assert set(table["fate"].dropna()) <= {"trained", "no_signal", "evaluated", "over_age", "too_stale"}
    evaluated = table[table["fate"] == "evaluated"].groupby(["version", "task"]).size()
    assert evaluated.to_dict() == {(v, t): n for v, n in ((0, 12), (3, 6), (STEPS, 12)) for t in ("guess_number", "chain_sum")}


@pytest.mark.slow
def test_a_run_outlives_its_engine_and_one_worker_after_the_other(place: Any) -> None:
    running = place.start("lost", f"train.steps={STEPS}")
    running.says("evaluating step 0/")
    engine = running.process_like(is_engine)
    engine.kill()
    running.says("training step 1/")
    player = running.worker("player-0")
    player.kill()
    running.says("training step 3/")
    assert running.worker("player-0").pid != player.pid
    successor = running.process_like(is_engine)
    assert successor.pid != engine.pid
    running.worker("engine-0").kill()
    psutil.wait_procs([successor], timeout=GONE_S)
    assert not successor.is_running()  # it never outlives its worker
    running.says("training step 5/")
    running.worker("judge-0").kill()
    assert_ended_whole(place, "lost", running)


@pytest.mark.slow
def test_a_run_whose_trainer_dies_ends_in_one_line_and_can_be_resumed(place: Any) -> None:
    running = place.start("trainer", "train.steps=100000")
    running.says("training step 3/")
    running.worker("trainer-0").kill()
    assert running.wait() == 3, running.heard
    assert running.left() == []
    assert running.heard.splitlines()[-1].startswith("rollart: ")
    assert "Traceback" not in running.heard.splitlines()[-1]
    place.finish("trainer", f"train.steps={max(v.step for v in place.checkpoints('trainer').versions()) + 1}", resume=True)
