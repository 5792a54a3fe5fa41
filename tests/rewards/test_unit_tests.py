"""Code judged by tests: partial credit, reasons, and programs that try to pass without doing the work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollart.rewards import unit_tests
from rollart.rewards.protocol import Verdict, VerifierFailed
from rollart.rewards.registry import verify
from rollart.rewards.unit_tests import code_of
from rollart.types import Attempt, Episode, Trajectory
from tests.sandbox.needs import needs_sandbox

TESTS = ["assert add(1, 2) == 3", "assert all(add(i, -1) == i - 1 for i in range(4))"]


def judged(code: str, tests: Any = TESTS, **info: Any) -> Verdict:
    info = {"action": code, "tests": tests} | info
    return verify("unit_tests", Trajectory(Attempt(Episode("t", 0), 0), "n", 0, 0, [], "terminated", info))


def test_the_code_is_the_first_fenced_block_or_all_or_the_whole() -> None:
    text = "So:\n```python\na = 1\n```\nand\n```\nb = 2\n```"
    assert code_of(text) == "a = 1\n"
    assert code_of(text, "all") == "a = 1\n\nb = 2\n"
    assert code_of("c = 3") == "c = 3"
    assert code_of("```py\nd = 4") == "d = 4"


@needs_sandbox
def test_the_value_is_the_share_of_tests_that_pass() -> None:
    assert judged("```python\ndef add(a, b):\n    return a + b\n```") == Verdict(1.0, {"passed": 2, "tests": 2})
    half = judged("def add(a, b): return 3")
    assert (half.value, half.parts["passed"]) == (0.5, 1) and half.reason.startswith("test 1: AssertionError")
    assert judged("def add(a, b: return").reason.startswith("test 0: SyntaxError")


@needs_sandbox
def test_values_of_all_plain_kinds_exceptions_and_objects_are_tested() -> None:
    code = "def echo(x, *, y=0): return x\ndef bad(): raise KeyError('k')\nclass Stack:\n    def __init__(self): self.x = []\n"
    code += "    def push(self, v): self.x.append(v)\n    def top(self): return self.x[-1]\ndef inf(): return float('inf')"
    tests = [
        "for v in (1, -2.5, 'a\\u20ac', b'b', None, True, [1, (2,), {3}], {'k': {'n': []}}, (), set(), 1j): assert echo(v, y=1) == v, v",
        "try: bad()\nexcept KeyError: pass\nelse: raise AssertionError",
        "s = Stack(); s.push((1, 2)); assert s.top() == (1, 2); assert s.x == [(1, 2)]",
        "assert inf() > 1e308",
    ]
    assert judged(code, tests) == Verdict(1.0, {"passed": 4, "tests": 4})


@needs_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "import os\nprint('{\"passed\": true}')\nos._exit(0)",
        "raise SystemExit(0)",
        "class Equal:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\ndef add(a, b): return Equal()",
        "class Int(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Int(9)",
        "def all(x): return True\ndef add(a, b): return 9",
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.all = lambda x: True\ndef add(a, b): return 9",
        "import sys\nsys.settrace(lambda *a: None)\nfor m in list(sys.modules.values()): vars(m).update(passed=True)\ndef add(a, b): return 9",
        "import os\nfor fd in range(9):\n    try: os.write(fd, b'{\"passed\": true}')\n    except OSError: pass\ndef add(a, b): return 9",
        "import os\nos.write(3, b'\\0\\0\\0\\x10(\\'ok\\', [\\'all\\'])')\ndef add(a, b): return 9",
        "def add(a, b): raise AssertionError",
        "def add(a, b): return '9' * (1 << 21)",
        "def add(a, b): return eval('[' * 90 + ']' * 90)",
    ],
)  # fmt: skip
def test_a_program_that_does_not_do_the_work_does_not_win(code: str) -> None:
    assert judged(code).value == 0.0


@needs_sandbox
def test_the_tests_builtins_are_never_the_codes() -> None:
    tests = ["assert add(1, 0) == len([1])", "assert sorted([2, 1]) == [add(1, 0), 2]"]
    assert judged("def len(x): return 9\ndef sorted(x): return [9, 2]\ndef add(a, b): return 9", tests).value == 0.0


@needs_sandbox
def test_the_code_finds_no_test_to_read() -> None:
    code = "import os\nseen = []\nfor root, _, files in os.walk('/workspace'): seen += files\nfor root, _, files in os.walk('/tmp'): seen += files\n"
    code += "seen += [p for p in os.listdir('/proc') if p.isdigit() and p not in ('1', str(os.getpid()))]\ndef found(): return seen"
    assert judged(code, ["assert found() == []", "secret_marker = 1\nassert found() == []"]).value == 1.0


@needs_sandbox
def test_a_loop_fails_its_test_alone_with_the_limit_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_tests, "LIMITS", dataclasses.replace(unit_tests.LIMITS, cpu_s=1.0))
    verdict = judged("def f(x):\n    while x: pass\n    return x", ["assert f(1) == 1", "assert f(0) == 0"])
    assert verdict.value == 0.5 and "limit on cpu" in verdict.reason


@needs_sandbox
def test_programs_are_judged_by_what_they_print() -> None:
    tests = [{"stdin": "4\n", "stdout": "8"}, {"stdin": "x", "stdout": "8"}, {"stdin": "5", "stdout": "8"}]
    verdict = judged("print(int(input()) * 2)", tests)
    assert verdict.parts == {"passed": 1, "tests": 3}
    assert "ValueError" in verdict.reason and "printed '10\\n', expected '8'" in verdict.reason


def test_without_tests_it_is_an_error_not_a_score() -> None:
    with pytest.raises(VerifierFailed, match="has to name a test"):
        judged("x = 1", [])
