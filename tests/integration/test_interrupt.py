"""Ctrl-C, as a terminal sends it: to every process of the run at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

ENDLESS = "train.steps=100000"


@pytest.fixture(scope="module")
def stopped(place: Any) -> SimpleNamespace:
    """A run that was interrupted in the middle of training and then resumed to its end, seen after each of the two."""
    first = place.start("stopped", ENDLESS)
    first.says("training step 2/")
    first.interrupt()
    code, left = first.wait(), first.left()
    steps = [line["step"] for line in place.metrics("stopped", "step")]
    reached = steps[-1]
    saved = [str(v) for v in place.checkpoints("stopped").versions()]
    second = place.start("stopped", f"train.steps={reached + 3}", resume=True)
    return SimpleNamespace(
        first=first, code=code, left=left, steps=steps, reached=reached, saved=saved, second=second, second_code=second.wait(), place=place
    )  # fmt: skip


def test_ctrl_c_finishes_the_step_saves_it_and_says_how_to_go_on(stopped: SimpleNamespace) -> None:
    assert stopped.code == 130, stopped.first.heard
    assert stopped.left == []
    assert stopped.reached >= 2
    assert stopped.saved[-1] == f"0-{stopped.reached}"
    assert stopped.first.heard.splitlines()[-1] == "rollart: interrupted; go on with --resume --set run.name=stopped"
    assert "Traceback" not in stopped.first.heard
    assert not stopped.first.shared_memory.exists()


def test_resume_goes_on_in_the_next_lineage_without_a_gap_or_a_step_twice(stopped: SimpleNamespace) -> None:
    place, reached = stopped.place, stopped.reached
    assert stopped.second_code == 0, stopped.second.heard
    assert [line["step"] for line in place.metrics("stopped", "step")] == list(range(1, reached + 4))
    assert [line["version"] for line in place.metrics("stopped", "step")][-3:] == [f"1-{reached + n}" for n in (1, 2, 3)]
    published = [str(v) for v in place.weights("stopped").versions()]
    assert published == [*(f"0-{n}" for n in range(reached + 1)), *(f"1-{reached + n}" for n in range(4))]
    assert [line["step"] for line in place.metrics("stopped", "resume")] == [reached]
    counted = [(b.coordinator, b.lineage, b.step) for b in place.journal("stopped").batches()]
    taken_over = reached + 1  # after the first coordinator's own entry and a step each
    assert counted == [*((0, 0, n) for n in range(reached)), *((taken_over, 1, reached + n) for n in range(3))]
    assert place.journal("stopped").numbers() == list(range(taken_over + 4))


def test_what_a_resumed_run_trained_on_it_trained_on_once_and_inside_the_window(stopped: SimpleNamespace) -> None:
    table = stopped.place.trajectories("stopped")
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(["task", "episode", "member"]).any()
    assert sorted(trained["version"].unique()) == list(range(stopped.reached + 3))
    assert trained["staleness"].between(0, 1).all()
    assert (trained.groupby("version").size() == 4 * 4 + 2 * 3).all()


def test_ctrl_c_twice_kills_everything_at_once(place: Any) -> None:
    running = place.start("twice", ENDLESS)
    running.says("training step 1/")
    semaphores = {Path(m.path) for m in psutil.Process(running.process.pid).memory_maps() if "/dev/shm/sem." in m.path}
    assert semaphores
    running.interrupt()
    running.says("Ctrl-C again kills at once")
    running.interrupt()
    assert running.wait() == 130
    assert running.left() == []
    assert [s for s in semaphores if s.exists()] == []
    assert "Traceback" not in running.heard


def test_ctrl_c_while_the_cluster_starts_leaves_nothing_behind(place: Any) -> None:
    running = place.start("early", ENDLESS)
    running.grows_to(5)  # the workers are there, and still import
    running.interrupt()
    assert running.wait() == 130, running.heard
    assert running.left() == []
    assert running.heard.splitlines()[-1] == "rollart: interrupted before the run began"
    assert "Traceback" not in running.heard
