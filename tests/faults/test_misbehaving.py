"""Environments and verifiers that hang, raise, return garbage or end their process: the run goes on, drops nothing and says what happened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import PATIENCE_S
from tests.faults.misbehaving import FOLDER

STEPS = 5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def misbehaving(name: str) -> str:
    return f"tests.faults.misbehaving:{name}"


def assert_ended_whole(place: Any, name: str, running: Any) -> None:
    """Every step was taken once, on whole batches inside the window, and each planned trajectory has one fate."""
    assert running.wait() == 0, running.heard
    assert running.left() == []
    assert not running.shared_memory.exists()
    assert [line["step"] for line in place.metrics(name, "step")] == list(range(1, STEPS + 1))
    table = place.trajectories(name)
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(["task", "episode", "member"]).any()
    assert (trained.groupby("version").size() == 4 * 4 + 2 * 3).all()
    assert trained["staleness"].between(0, 1).all()


def failures(place: Any, name: str) -> dict[str, int]:
    """Failed attempts by cause, as the last step's line has them."""
    ends = place.metrics(name, "step")[-1]["ends"]
    return {end.removeprefix("failed:"): count for end, count in ends.items() if end.startswith("failed:")}


def test_a_run_outlives_environments_and_verifiers_that_hang_raise_return_garbage_and_end_their_process(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments, verifiers = tmp_path / "environments", tmp_path / "verifiers"
    environments.mkdir()
    verifiers.mkdir()
    monkeypatch.setenv(FOLDER, str(verifiers))
    running = place.start(
        "misbehaving", f"train.steps={STEPS}", f"tasks.guess_number.environment={misbehaving('Misbehaving')}",
        f"tasks.guess_number.settings.folder={environments}", "tasks.guess_number.run_in=thread", "tasks.guess_number.reset_timeout=2",
        f"tasks.guess_number.reward={misbehaving('verdict')}", "tasks.guess_number.score_in=future", "tasks.guess_number.reward_timeout=2",
        "rollout.rest=0.05", "rollout.attempts=5",
    )  # fmt: skip
    running.says("evaluating step 0/")
    for folder in (environments, verifiers):
        (folder / "begin").touch()
    assert_ended_whole(place, "misbehaving", running)
    for folder, kinds in ((environments, ("hung", "raised", "no-text", "no-result")), (verifiers, ("hung", "raised", "killed"))):
        for kind in kinds:
            assert list(folder.glob(f"{kind}*")), (folder, kind)
    failed = failures(place, "misbehaving")
    assert failed["environment"] and failed["reward"] >= 2
    assert place.metrics("misbehaving", "step")[-1]["fates"].get("failed", 0) == 0
    table = place.trajectories("misbehaving")
    scored = table[table["fate"].isin(["trained", "no_signal"]) & (table["task"] == "guess_number")]
    assert scored["score"].isin([0.0, 1.0]).all()


def test_a_worker_whose_calls_never_come_back_is_replaced_and_the_user_told(place: Any, tmp_path: Path) -> None:
    running = place.start(
        "swallowed", f"train.steps={STEPS}", f"tasks.guess_number.environment={misbehaving('Swallowing')}",
        f"tasks.guess_number.settings.folder={tmp_path}", "tasks.guess_number.run_in=thread", "tasks.guess_number.reset_timeout=1",
        "rollout.rest=0.05", "rollout.silence=3",
    )  # fmt: skip
    running.says("training step 1/")
    first = running.worker("player-0")
    (tmp_path / "begin").touch()
    running.says("worker player-0 leaves (")
    gone, _ = psutil.wait_procs([first], timeout=PATIENCE_S)
    assert gone and running.process.poll() is None
    assert_ended_whole(place, "swallowed", running)
    (told,) = place.metrics("swallowed", "told")
    assert "calls have not come back, the last: reset" in told["text"]
    silent = [line["text"] for line in place.metrics("swallowed", "silence")]
    assert any(re.search(r"of guess_number on worker player-0: \d+ in reset for \d+ s", text) for text in silent), silent


def test_a_worker_that_goes_over_its_limit_of_memory_costs_its_own_trajectories_only_and_none_of_their_tries(place: Any, tmp_path: Path) -> None:
    running = place.start(
        "greedy", f"train.steps={STEPS}", f"tasks.guess_number.environment={misbehaving('Greedy')}",
        f"tasks.guess_number.settings.folder={tmp_path}", "tasks.guess_number.run_in=thread", "hardware.player.memory=1000MiB",
        "hardware.player.workers=2", "hardware.player.slots=24",
    )  # fmt: skip
    running.says("training step 1/")
    before = {name: running.worker(name) for name in ("player-0", "player-1")}
    (tmp_path / "begin").touch()
    running.says("training step 5/")
    assert_ended_whole(place, "greedy", running)
    (other,) = [name for name, process in before.items() if process.pid != int((tmp_path / "taker").read_text())]
    assert failures(place, "greedy") == {}
    assert other not in running.heard  # it has neither left nor been ended
