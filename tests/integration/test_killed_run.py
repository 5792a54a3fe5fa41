"""A deterministic run equals itself bit for bit: uninterrupted, beside killed in the middle and stopped, each then resumed."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

STEPS = 10
REPEATED = ("run.deterministic=true", "train.alpha=0", "train.checkpoint_every=5", "weights.keep_last=0")
DETERMINISTIC = (*REPEATED, f"train.steps={STEPS}")


@pytest.fixture(scope="module")
def whole(place: Any) -> Any:
    """An uninterrupted deterministic run."""
    place.finish("whole", *DETERMINISTIC)
    return place


@pytest.fixture(scope="module")
def killed(place: Any) -> SimpleNamespace:
    """The same run, its main process killed after the checkpoint in its middle, then resumed to the end."""
    first = place.start("killed", *REPEATED, "train.steps=100000", "evaluate.every=0")
    first.says("training step 6/")
    os.kill(first.process.pid, signal.SIGKILL)
    code, left = first.wait(), first.left(seconds=20.0)
    parent = place.checkpoints("killed").versions()[-1]
    second = place.start("killed", *DETERMINISTIC, "evaluate.every=0", resume=True)
    return SimpleNamespace(first=first, code=code, left=left, parent=parent, second=second, second_code=second.wait(), place=place)


def test_nothing_outlives_a_killed_main_process(killed: SimpleNamespace) -> None:
    assert killed.code == -signal.SIGKILL
    assert killed.left == []


def test_a_killed_run_goes_on_from_its_last_checkpoint(killed: SimpleNamespace) -> None:
    place, parent = killed.place, killed.parent
    assert killed.second_code == 0, killed.second.heard
    assert parent.step == 5
    assert [line["step"] for line in place.metrics("killed", "step")] == list(range(1, STEPS + 1))
    assert [line["step"] for line in place.metrics("killed", "resume")] == [parent.step]
    assert [str(v) for v in place.weights("killed").versions() if v.lineage == 1] == [f"1-{n}" for n in range(parent.step, STEPS + 1)]
    table = place.trajectories("killed")
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(["task", "episode", "member"]).any()
    assert sorted(trained["version"].unique()) == list(range(STEPS))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one_bit_for_bit(whole: Any, killed: SimpleNamespace) -> None:
    assert killed.second_code == 0, killed.second.heard
    assert_equal_weights(whole, "whole", "killed")
    assert trained_on(whole, "killed") == trained_on(whole, "whole")
    evaluated = [{line["step"]: line["reward"] for line in whole.metrics(name, "evaluation")} for name in ("whole", "killed")]
    assert {step: evaluated[0][step] for step in evaluated[1]} == evaluated[1] and set(evaluated[1]) == {0, STEPS}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one_bit_for_bit(whole: Any, place: Any) -> None:
    running = place.start("stopped", *REPEATED, "train.steps=100000")
    running.says("training step 2/")
    running.interrupt()
    assert running.wait() == 130, running.heard
    place.finish("stopped", *DETERMINISTIC, resume=True)
    assert len({v.lineage for v in place.weights("stopped").versions()}) == 2
    assert_equal_weights(place, "whole", "stopped")
    assert trained_on(place, "stopped") == trained_on(place, "whole")


def assert_equal_weights(place: Any, name: str, other: str) -> None:
    """Each version of `name` equals, in every bit, every version of that step that `other` published, on whichever lineage."""
    first, second = place.weights(name), place.weights(other)
    learned = {line["step"] for line in place.metrics(name, "step") if line["train"]["optimiser_steps"]}
    assert len(learned) >= 3  # else the weights would be equal for want of training
    for version in first.versions():
        mine = first.pull(version)
        others = [v for v in second.versions() if v.step == version.step]
        assert others
        for v in others:
            theirs = second.pull(v)
            assert {n: t.numpy().tobytes() for n, t in mine.items()} == {n: t.numpy().tobytes() for n, t in theirs.items()}, (version, v)


def trained_on(place: Any, name: str) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """What each step of the surviving lineage was trained on: ids, log-probabilities, versions and score by member."""
    table = place.trajectories(name)
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    found = {}
    for row in trained.itertuples():
        (segment,) = row.segments
        content = tuple(tuple(segment[key].tolist()) for key in ("ids", "mask", "logprobs", "versions"))
        found[row.version, row.task, row.episode, row.member] = (*content, row.score, row.fate)
    return found
