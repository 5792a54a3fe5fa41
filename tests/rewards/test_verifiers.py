"""What verifiers return, and that their failures are never scores."""

import dataclasses
import json
import math

import numpy as np
import pytest

from rollart.environments.registry import make
from rollart.rewards.protocol import Verdict, VerifierFailed
from rollart.rewards.registry import UnknownVerifier, resolve, verify
from rollart.sandbox.limits import SandboxMissing
from rollart.types import Attempt, Episode, Segment, Trajectory


def trajectory(rewards=(0.0,), info=None):
    segment = Segment()
    for reward in rewards:
        segment.append_prompt([1])
        segment.append_response([2], [-0.5], [0], "stop")
        segment.reward_last_turn(reward)
    return Trajectory(Attempt(Episode("task", 0), 0), "n", 0, 0, [segment], "terminated", info or {})


def answered(action, seed=3):
    environment = make("reasoning", config={"min_terms": 2, "max_terms": 2})
    environment.reset(seed)
    return trajectory(info=environment.step(action).info | {"action": action})


def broken(trajectory):
    raise KeyError("gone")


def not_finite(trajectory):
    return Verdict(math.nan)


def bare_number(trajectory):
    return 0.5


def text_for_a_number(trajectory):
    return Verdict("1.0")


def part_that_is_no_number(trajectory):
    return Verdict(1.0, {"length": None})


def part_that_is_not_finite(trajectory):
    return Verdict(1.0, {"length": math.inf})


def several_values(trajectory):
    return Verdict(np.zeros(2))


def without_a_reason(trajectory):
    return Verdict(1.0, reason=None)


def leaves(trajectory):
    raise SystemExit(4)


def panics(trajectory):
    class Panic(BaseException):
        """As Rust packages raise it: no Exception."""

    raise Panic("boom")


async def waits(trajectory):
    return Verdict(1.0)


def of_arrays(trajectory):
    return Verdict(np.float32(0.5), {"length": np.int64(3)}, "half \ud800")


def test_a_verdict_of_an_array_librarys_numbers_is_made_plain():
    verdict = verify(f"{__name__}:of_arrays", trajectory())
    assert verdict == Verdict(0.5, {"length": 3.0}, "half \\ud800")
    assert json.loads(json.dumps(dataclasses.asdict(verdict)))["parts"] == {"length": 3.0}


def test_the_environments_rewards_are_summed_over_turns():
    assert verify("environment", trajectory((0.25, 0.0, 1.0))) == Verdict(1.25)


def test_the_librarys_scorer_judges_the_answer():
    right = answered("").info["entry"]["answer"]
    assert verify("reasoning", answered(right)) == Verdict(1.0)
    assert verify("reasoning", answered(f" {right}\n")).value == 1.0
    words = make("reasoning", family="gcd")
    words.reset(3)
    info = words.step("").info
    assert verify("reasoning", trajectory(info=info | {"action": f" {info['entry']['answer']}\n"})).value == 1.0
    wrong = verify("reasoning", answered("x"))
    assert wrong.value == 0.0
    assert wrong.reason == f"answered 'x', expected {right!r}"


def test_where_only_a_part_of_the_response_counts_that_is_judged():
    environment = make("reasoning", config={"min_terms": 2, "max_terms": 2}, answer="-?[0-9]+")
    environment.reset(3)
    right = environment.step("").info["entry"]["answer"]
    scores = {}
    for action in (f"It is {right}.", f"{right} or 77777", "It is.", right):
        scores[action] = verify("reasoning", trajectory(info=environment.step(action).info | {"action": action})).value
    assert scores[f"It is {right}."] == scores[right] == 1.0
    assert scores[f"{right} or 77777"] < 1.0 and scores["It is."] == 0.0


@pytest.mark.parametrize("action", ["__import__('os').system('touch hacked')", "9**9**9**9", "1e999999999", "(" * 5000, "sNaN"])
def test_a_hostile_answer_is_a_wrong_answer_and_runs_nothing(action, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert verify("reasoning", answered(action)).value < 0.5
    assert list(tmp_path.iterdir()) == []


def test_a_trajectory_of_an_unsafe_family_is_an_error_not_a_score_where_there_is_no_sandbox(monkeypatch):
    def run_warm(*args, **settings):
        raise SandboxMissing("no sandbox for countdown")

    monkeypatch.setattr("rollart.sandbox.scoring.run_warm", run_warm)
    hostile = answered("1+1")
    hostile.info["family"] = "countdown"
    with pytest.raises(VerifierFailed, match=r"countdown"):
        verify("reasoning", hostile)


def test_missing_info_is_an_error_not_a_score():
    with pytest.raises(VerifierFailed, match=r"train/task/0/0/0.*KeyError.*action"):
        verify("reasoning", trajectory())


@pytest.mark.parametrize(
    "name",
    [
        "broken", "not_finite", "bare_number", "text_for_a_number", "part_that_is_no_number", "part_that_is_not_finite", "several_values",
        "without_a_reason", "leaves", "panics",
    ],
)  # fmt: skip
def test_a_verifier_that_raises_or_returns_no_finite_verdict_is_an_error(name):
    with pytest.raises(VerifierFailed, match=name):
        verify(f"{__name__}:{name}", trajectory())


def test_the_cause_of_a_failure_is_kept():
    with pytest.raises(VerifierFailed) as failed:
        verify(f"{__name__}:broken", trajectory())
    assert isinstance(failed.value.__cause__, KeyError)


def test_a_coroutine_function_is_refused_as_a_verifier_before_anything_is_played():
    with pytest.raises(UnknownVerifier, match=r"waits.*coroutine function; make it a plain one"):
        resolve(f"{__name__}:waits")


@pytest.mark.parametrize("name", ["environmnt", "no.module:thing", "rollart.rewards.registry:nothing", "rollart.rewards.registry:NAMES"])
def test_an_unknown_verifier_is_refused(name):
    with pytest.raises(UnknownVerifier, match=name.split(":")[-1]):
        resolve(name)
