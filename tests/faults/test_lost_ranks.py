"""Ranks that die in the middle of a step: training goes on with one in the lost one's place, as if nothing had been, or from a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

STEPS = 6
RANKS = ("hardware.trainer.workers=2", "evaluate.every=0", "evaluate.episodes=6")
DETERMINISTIC = (*RANKS, "run.deterministic=true", "train.alpha=0", "weights.keep_last=0")

STARTED_S = 3.0
"""Within which the next step has begun; it waits for a stopped rank, and nothing outside of it says so."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def whole(place: Any) -> Any:
    """An undisturbed deterministic run on two ranks."""
    place.finish("whole", *DETERMINISTIC, f"train.steps={STEPS}")
    return place


def kill_in_a_step(worker: psutil.Process) -> None:
    """Kills a rank when the others are in a step and wait for it."""
    worker.suspend()
    time.sleep(STARTED_S)
    worker.kill()


def bits(place: Any, name: str) -> dict[int, dict[str, bytes]]:
    """The weights after each step, of the newest lineage that has them."""
    store = place.weights(name)
    return {v.step: {n: t.numpy().tobytes() for n, t in store.pull(v).items()} for v in store.versions()}


def assert_went_on_as_if_nothing_had_been(place: Any, name: str, running: Any) -> None:
    assert running.wait() == 0, running.heard
    assert running.left() == []
    assert "the group of 2 ranks is formed anew with 2 (1 of them as before): train-step" in running.heard
    assert [line["step"] for line in place.metrics(name, "step")] == list(range(1, STEPS + 1))
    assert {v.lineage for v in place.weights(name).versions()} == {0}
    assert sum(line["train"]["optimiser_steps"] for line in place.metrics(name, "step")) >= 3  # else all were equal for want of training
    assert bits(place, name) == bits(place, "whole")


def test_a_rank_that_dies_in_a_step_is_replaced_and_the_step_is_taken_once(whole: Any) -> None:
    running = whole.start("second", *DETERMINISTIC, f"train.steps={STEPS}")
    running.says("training step 2/")
    kill_in_a_step(running.worker("trainer-1"))
    assert_went_on_as_if_nothing_had_been(whole, "second", running)


def test_the_rank_that_the_others_met_at_and_that_publishes_can_die_too(whole: Any) -> None:
    running = whole.start("first", *DETERMINISTIC, f"train.steps={STEPS}")
    running.says("training step 2/")
    kill_in_a_step(running.worker("trainer-0"))
    assert_went_on_as_if_nothing_had_been(whole, "first", running)


def test_training_goes_on_with_fewer_ranks_until_a_worker_is_there_again(place: Any) -> None:
    running = place.start("fewer", *RANKS, "train.steps=40", "training.ranks.replacement=0")
    running.says("training step 2/")
    kill_in_a_step(running.worker("trainer-1"))
    running.says("is formed anew with 1 (1 of them as before)")
    running.says("the group of 1 ranks is formed anew with 2")
    assert running.wait() == 0, running.heard
    assert [line["step"] for line in place.metrics("fewer", "step")] == list(range(1, 41))


def test_a_rank_that_dies_while_the_policy_is_warmed_up_is_replaced(place: Any) -> None:
    running = place.start("warming", *RANKS, "train.steps=2", "warm_up.steps=60")
    running.says("warm-up step 6/")
    kill_in_a_step(running.worker("trainer-1"))
    assert running.wait() == 0, running.heard
    assert "is formed anew with 2 (1 of them as before): supervised-step" in running.heard
    assert [line["step"] for line in place.metrics("warming", "step")] == [1, 2]


@pytest.mark.parametrize("shard", [False, True])
def test_a_run_that_no_rank_can_go_on_from_ends_in_one_line_and_can_be_resumed(place: Any, shard: bool) -> None:
    """With whole models that takes the loss of all ranks, with spread ones that of any."""
    name = f"lost-{shard}"
    running = place.start(name, *RANKS, f"training.model.shard={shard}", "train.steps=100000")
    running.says("training step 3/")
    lost = [running.worker("trainer-1"), *([] if shard else [running.worker("trainer-0")])]
    for worker in lost:
        worker.suspend()
    for worker in lost:
        worker.kill()
    assert running.wait() == 3, running.heard
    assert running.left() == []
    assert "go on from there with --resume" in running.heard.splitlines()[-1]
    place.finish(name, *RANKS, f"training.model.shard={shard}", f"train.steps={place.checkpoints(name).versions()[-1].step + 2}", resume=True)


def test_a_killed_and_resumed_run_on_two_ranks_equals_the_whole_one_bit_for_bit(whole: Any) -> None:
    first = whole.start("resumed", *DETERMINISTIC, "train.steps=100000")
    first.says("training step 3/")
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert first.left(seconds=20.0) == []
    whole.finish("resumed", *DETERMINISTIC, f"train.steps={STEPS}", resume=True)
    found, wanted = bits(whole, "resumed"), bits(whole, "whole")
    assert all(found[step] == wanted[step] for step in range(STEPS + 1))
