"""Answers that are scored in a sandbox: right ones, wrong ones, hostile ones, and a sandbox that breaks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollart.environments.registry import make
from rollart.rewards.protocol import VerifierFailed
from rollart.rewards.registry import is_light, verify
from rollart.sandbox import scoring
from rollart.sandbox.scoring import EVALUATED, why_no_expression
from rollart.types import Attempt, Episode, Trajectory
from tests.sandbox.needs import needs_sandbox


def answered(family: str, answer: str | None = None) -> Trajectory:
    """A trajectory with the family's own answer, or another."""
    environment: Any = make("reasoning", family=family)
    environment.reset(1)
    info = environment.step("").info
    return Trajectory(Attempt(Episode("t", 0), 0), "n", 0, 0, [], "terminated", info | {"action": answer or info["entry"]["answer"]})


@needs_sandbox
@pytest.mark.parametrize("family", [*sorted(EVALUATED), "coin_flip", "knights_knaves"])
def test_a_familys_own_answer_scores_one_and_another_less(family: str) -> None:
    right, wrong = answered(family), answered(family, "x")
    assert verify("reasoning", right).value == 1.0
    assert verify("reasoning", wrong).value < 0.5
    assert not is_light("reasoning", right)


@needs_sandbox
def test_an_answer_that_never_ends_is_a_zero_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LIMITS", dataclasses.replace(scoring.LIMITS, cpu_s=1.0))
    for family, answer in (("countdown", "9**9**9**9"), ("coin_flip", "1e999999999")):
        verdict = verify("reasoning", answered(family, answer))
        assert verdict.value == 0.0 and "limit on" in verdict.reason
    assert verify("reasoning", answered("countdown")).value == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('touch hacked')", "exec(chr(112)+chr(97))", "eval(input())", "x.func", "(1).real", "lambda: 1", "[1]", "a=1",
        "ｅxec(1)", "open(1)", "x .y", "1 if 1 else 2", "getattr(x,y)", "x1.y", "1..real", "1e5.real",
    ],
)  # fmt: skip
def test_what_could_run_as_a_program_is_no_expression(answer: str) -> None:
    assert why_no_expression(answer) is not None


@pytest.mark.parametrize("answer", ["94*4 - 61 - 6", "-34*x**8/15 - 5*x/4 + C", "exp(-x)*sin(2*x)/2.5 + C", "x^2", "1e-3*x", "", "sqrt(2)*log(x)"])
def test_plain_mathematics_is_an_expression(answer: str) -> None:
    assert why_no_expression(answer) is None


@needs_sandbox
def test_a_scorer_that_breaks_is_an_error_not_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_CODE", "raise OSError('no space')")
    with pytest.raises(VerifierFailed, match="no space"):
        verify("reasoning", answered("countdown"))
    monkeypatch.setattr(scoring, "_CODE", 'print(\'{"nonce": "x", "score": 1.0}\')')
    with pytest.raises(VerifierFailed, match="scorer of 'countdown'"):
        verify("reasoning", answered("countdown"))
