"""Training over two ranks that loses one of them, all of them, or the whole run: no batch counts twice, and no bit of the weights changes."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.conftest import GONE_S
from tests.integration.test_killed_run import assert_equal_weights, trained_on

STEPS = 10
PATIENT = ("training.ranks.timeout=3600", "training.ranks.replacement=3600")
"""Ranks don't give each other up in the time that a test has, the loss of one has to be noticed before; and a worker comes in its place."""

RANKS = (*PATIENT, "hardware.trainer.workers=2", "stages.reward=player", "evaluate.every=0", "evaluate.episodes=6")
DETERMINISTIC = (*RANKS, "run.deterministic=true", "train.alpha=0", "weights.keep_last=0", "train.checkpoint_every=5")
SPREAD = "training.model.shard=true"
ENDLESS = "train.steps=100000"
TRIES, TRY_S = 40, 15.0

pytestmark = [pytest.mark.timeout(3600), pytest.mark.slow]


@pytest.fixture(scope="module")
def whole(place: Any) -> str:
    """An undisturbed deterministic run on two ranks, each with the whole model."""
    place.finish("whole", *DETERMINISTIC, f"train.steps={STEPS}")
    return "whole"


@pytest.fixture(scope="module")
def spread(place: Any) -> str:
    """The same with the model spread over the ranks."""
    place.finish("spread", *DETERMINISTIC, SPREAD, f"train.steps={STEPS}")
    return "spread"


def stop_in_a_step(running: Any, step: str = "train-step") -> psutil.Process:
    """Stops the second rank when both are in a step, or about to be, so that neither comes to its end; the stopped process."""
    stopped: psutil.Process = running.worker("trainer-1")
    for _ in range(TRIES):
        stopped.suspend()
        if running.is_given(step, TRY_S):
            return stopped
        stopped.resume()  # it was writing its part of a spread model, say, which the next step waits for
    raise AssertionError(f"no {step} was begun: {running.heard}")


def kill_in_a_step(running: Any, name: str, step: str = "train-step") -> None:
    """Kills the rank of the worker called `name` when both are in a step."""
    victim = running.worker(name)
    stopped = stop_in_a_step(running, step)
    victim.kill()
    if victim != stopped:
        stopped.resume()


def goes_on_with(running: Any, ranks: int, times: int = 1, *, phase: str = "training") -> None:
    """Returns once the run has formed its group anew with `ranks` that often, and then taken a step."""
    running.says(f"is formed anew with {ranks} (", times)
    running.says(f"{phase} step ", running.heard.count(f"{phase} step ") + 1)


def assert_each_batch_counts_once(place: Any, name: str, steps: int = STEPS) -> None:
    """One settlement a step on the lineage that survived, and one fate a trajectory, over all of them."""
    assert [line["step"] for line in place.metrics(name, "step")] == list(range(1, steps + 1))
    table = place.trajectories(name)
    used = table[table["fate"].isin(["trained", "no_signal"])]
    assert not used.duplicated(["task", "episode", "member"]).any()
    assert (used.groupby("version").size() == 4 * 4 + 2 * 3).all()
    assert sorted(used["version"].unique()) == list(range(steps))


def test_ranks_that_die_in_a_step_are_replaced_and_the_step_is_taken_once(place: Any, whole: str) -> None:
    """First one, then the one where the others meet, which publishes and hands the state on."""
    running = place.start("replaced", *DETERMINISTIC, f"train.steps={STEPS}")
    running.says("training step 1/")
    kill_in_a_step(running, "trainer-1")
    goes_on_with(running, 2)
    kill_in_a_step(running, "trainer-0")
    assert running.wait() == 0, running.heard
    assert running.left(GONE_S) == []
    assert running.heard.count("the group of 2 ranks is formed anew with 2 (1 of them as before)") == 2
    assert {v.lineage for v in place.weights("replaced").versions()} == {0}
    assert [b.step for b in place.journal("replaced").batches()] == list(range(STEPS))
    assert_each_batch_counts_once(place, "replaced")
    assert_equal_weights(place, whole, "replaced")
    assert trained_on(place, "replaced") == trained_on(place, whole)


def test_training_goes_on_with_fewer_ranks_until_a_worker_is_there_again(place: Any) -> None:
    """In the warm-up, and in training."""
    running = place.start("fewer", *RANKS, "warm_up.steps=60", "train.steps=40", "training.ranks.replacement=0")
    running.says("warm-up step 6/")
    kill_in_a_step(running, "trainer-1", "supervised-step")
    goes_on_with(running, 1, phase="warm-up")
    goes_on_with(running, 2)
    assert "formed anew with 1 (1 of them as before): supervised-step" in running.heard
    kill_in_a_step(running, "trainer-1")
    goes_on_with(running, 1, times=2)
    goes_on_with(running, 2, times=2)
    assert running.wait() == 0, running.heard
    assert "formed anew with 1 (1 of them as before): train-step" in running.heard
    assert_each_batch_counts_once(place, "fewer", 40)


@pytest.fixture(scope="module", params=["whole", "spread"])
def ended(request: pytest.FixtureRequest, place: Any) -> SimpleNamespace:
    """A deterministic run that is ended three times after its fifth step and resumed each time: its main process is killed, then so many
    ranks die that none can go on, then Ctrl-C comes in the middle of a step."""
    beside = request.getfixturevalue(request.param)
    name = f"ended-{beside}"
    settings = (*DETERMINISTIC, SPREAD) if beside == "spread" else DETERMINISTIC

    killed = place.start(name, *settings, ENDLESS)
    killed.says("training step 6/")
    os.kill(killed.process.pid, signal.SIGKILL)
    codes, left = [killed.wait()], [killed.left(GONE_S)]

    lost = place.start(name, *settings, ENDLESS, resume=True)
    lost.says("training step 6/")
    # Whole models outlive all ranks but one, spread ones none.
    workers = [lost.worker(rank) for rank in (("trainer-1",) if beside == "spread" else ("trainer-0", "trainer-1"))]
    for worker in workers:
        worker.suspend()
    for worker in workers:
        worker.kill()
    codes.append(lost.wait())
    left.append(lost.left(GONE_S))

    stopped = place.start(name, *settings, ENDLESS, resume=True)
    stopped.says("training step 6/")
    rank = stop_in_a_step(stopped)
    stopped.interrupt()
    stopped.says("finishing the step")
    rank.resume()
    codes.append(stopped.wait())
    left.append(stopped.left(GONE_S))
    reached = [line["step"] for line in place.metrics(name, "step")][-1]
    saved = place.checkpoints(name).versions()[-1]

    last = place.start(name, *settings, f"train.steps={STEPS}", resume=True)
    codes.append(last.wait())
    runs = {"killed": killed, "lost": lost, "stopped": stopped, "last": last}
    return SimpleNamespace(place=place, name=name, beside=beside, codes=codes, left=left, runs=runs, reached=reached, saved=saved)


def test_a_run_says_how_it_ended_and_leaves_nothing_behind(ended: SimpleNamespace) -> None:
    heard = "\n".join(running.heard for running in ended.runs.values())
    assert ended.codes == [-signal.SIGKILL, 3, 130, 0], heard
    assert ended.left == [[], [], []]
    assert "go on from there with --resume" in ended.runs["lost"].heard.splitlines()[-1]
    assert ended.runs["stopped"].heard.splitlines()[-1] == f"rollart: interrupted; go on with --resume --set run.name={ended.name}"
    assert "Traceback" not in heard


def test_ctrl_c_in_a_step_of_the_ranks_ends_it_and_saves_it(ended: SimpleNamespace) -> None:
    assert 6 < ended.reached == ended.saved.step


def test_a_resumed_run_goes_on_from_the_last_checkpoint_and_counts_each_batch_once(ended: SimpleNamespace) -> None:
    assert [line["step"] for line in ended.place.metrics(ended.name, "resume")] == [5, 5, ended.reached]
    assert_each_batch_counts_once(ended.place, ended.name)


def test_a_resumed_run_equals_the_undisturbed_one_bit_for_bit(ended: SimpleNamespace) -> None:
    # The second try lost its ranks before its first checkpoint, so that nothing goes on from it.
    assert {v.lineage for v in ended.place.weights(ended.name).versions()} == {0, 2, 3}
    assert_equal_weights(ended.place, ended.beside, ended.name)
    assert trained_on(ended.place, ended.name) == trained_on(ended.place, ended.beside)


@pytest.mark.parametrize("run", ["whole", "spread"])
def test_engines_have_the_weights_that_the_ranks_trained(request: pytest.FixtureRequest, place: Any, run: str) -> None:
    """What was sampled for a step has the probability that the ranks find for it: nothing else was trained on in between."""
    steps = place.metrics(request.getfixturevalue(run), "step")
    assert all(line["train"]["drift_max"] < 1e-4 for line in steps if line["train"]["optimiser_steps"])
