"""Mathematical answers: cheap comparisons, math-verify's, and texts made to hang it."""

from __future__ import annotations

import pytest

from rollart.rewards import mathematics
from rollart.rewards.registry import verify
from rollart.types import Attempt, Episode, Trajectory


def value(expected: str, action: str) -> float:
    info = {"expected": expected, "action": action}
    return verify("math", Trajectory(Attempt(Episode("t", 0), 0), "n", 0, 0, [], "terminated", info)).value


@pytest.mark.parametrize(
    ("expected", "action", "score"), [("1/2", "0.5", 1), ("1,000", " 1000 ", 1), ("3", "4", 0), ("x", "x", 1), ("0.10", "1/10", 1)]
)
def test_numbers_and_equal_texts_are_compared_without_a_process(expected: str, action: str, score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "waited", None)
    assert value(expected, action) == score


@pytest.mark.parametrize(
    ("expected", "action", "score"),
    [
        (r"\frac{1}{2}", r"so it is \boxed{0.5}", 1), ("x^2+2x+1", "it is $(x+1)^2$", 1), ("3", r"it is $\boxed{4}$", 0),
        ("7", "(" * 3000, 0), ("3", "1/0", 0),
    ],
)  # fmt: skip
def test_math_verify_judges_the_rest(expected: str, action: str, score: float) -> None:
    assert value(expected, action) == score


def test_what_takes_too_long_is_wrong_and_the_next_answer_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value("y", "$y$") == 1.0
    monkeypatch.setattr(mathematics, "LIMIT_S", 0.5)
    info = {"expected": "7", "action": "$9^{9^{9^{9}}}$"}
    verdict = verify("math", Trajectory(Attempt(Episode("t", 0), 0), "n", 0, 0, [], "terminated", info))
    assert verdict.value == 0.0 and "ended after 0.5 s" in verdict.reason
    monkeypatch.undo()
    assert value("y", "$y$") == 1.0
