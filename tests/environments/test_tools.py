"""Tool use on BFCL's classes, on the real package: its own solutions earn everything, and nothing a policy writes is evaluated."""

import random

import pytest

from rollart.environments.call_text import Call, NoCall, parse_calls
from rollart.environments.registry import make

HOSTILE = [
    "", "done", "__import__('os').system('touch owned')", "ls(a=__import__('os'))", "ls.__class__()", "_load_scenario({})", "ls(**{'a': 1})",
    "[" * 10_000, "x" * 100_000, '{"name": 5}', '{"name": "ls", "arguments": [1]}', "cd(folder=1)", "cd()", "cd('a', 'b', 'c')", "power(9, 9**9**9)",
    "power(base=999999999999999, exponent=999999999999999)",
    "logarithm(2, 3, precision=10000000)", "square_root(2, precision='x')", "f(" + "9" * 9000 + ")",
    "ls(a=1e999)", "ls(a=2j)", "ls(a={1, 2})", "(lambda: 1)()", "\0", "ls(); import os", '[{"name": "ls", "arguments": "{"}]',
]  # fmt: skip


def test_calls_are_read_in_both_notations():
    wanted = [Call("cd", (), {"folder": "a"}), Call("ls", (), {"a": True})]
    assert parse_calls("cd(folder='a')\nls(a=True)") == wanted
    assert parse_calls("[cd(folder='a'), ls(a=True)]") == wanted
    assert parse_calls('[{"name": "cd", "arguments": {"folder": "a"}}, {"name": "ls", "arguments": "{\\"a\\": true}"}]') == wanted
    assert parse_calls("sort('x')") == [Call("sort", ("x",), {})]


@pytest.mark.parametrize("text", [t for t in HOSTILE if not t.startswith(("cd(", "power(base", "logarithm", "square", "_load"))])
def test_what_is_no_literal_call_is_refused(text):
    with pytest.raises(NoCall):
        parse_calls(text)


@pytest.fixture
def tools():
    pytest.importorskip("bfcl_eval", reason="bfcl-eval isn't installed (make environments)")
    pytest.importorskip("mpmath", reason="the extra tools isn't installed")
    return make("tools", script_skill=1.0, turns=2)


def finish(tools, seed, rng):
    said = [tools.reset(seed)]
    while True:
        result = tools.step(tools.script(rng))
        said.append(result.observation)
        if result.terminated:
            return said, result


def test_bfcls_own_solutions_earn_everything(tools):
    seen = {}
    for seed in range(400):
        _, result = finish(tools, seed, random.Random(0))
        seen[result.info["task"]] = result.reward
    assert len(seen) > 150
    assert set(seen.values()) == {1.0}


def test_the_same_seed_is_the_same_episode_and_seeds_differ(tools):
    assert finish(tools, 4, random.Random(0)) == finish(tools, 4, random.Random(0))
    assert len({tools.reset(seed) for seed in range(20)}) > 10


def test_an_episode_by_hand(tools):
    seed = next(s for s in range(5000) if "Move 'final_report.pdf' within document directory" in tools.reset(s))
    said = tools.reset(seed)
    assert "\nmv(source: string, destination: string)\n" in said and "\ncp(" not in said
    first = tools.step("cd(folder='document')\nmkdir(dir_name='temp')\nmv(source='final_report.pdf', destination='temp')")
    assert '{"current_working_directory": "document"}' in first.observation and "request:" not in first.observation
    second = tools.step("done")
    assert second.info["right"] == [True] and second.observation.startswith("request: Perform a detailed search using grep")
    third = tools.step("grep(file_name='no such', pattern='x')")
    assert "error" in third.observation
    assert tools.step("done").info["right"] == [True, False]
    for _ in range(2):
        last = tools.step("I give up")
    assert (last.terminated, last.reward, last.info["right"]) == (True, 0.25, [True, False, False, False])


@pytest.mark.parametrize("action", HOSTILE)
def test_a_hostile_action_is_scored_and_evaluated_nowhere(action, tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        tools.reset(seed)
        for _ in range(30):
            result = tools.step(action)
            if result.terminated:
                break
        assert result.terminated and 0.0 <= result.reward < 1.0
    assert not list(tmp_path.iterdir())


def test_a_state_beyond_what_was_asked_for_is_not_right(tools):
    seed = next(s for s in range(5000) if "Move 'final_report.pdf' within document directory" in tools.reset(s))
    tools.reset(seed)
    tools.step("cd(folder='document')\nmkdir(dir_name='temp')\nmv(source='final_report.pdf', destination='temp')\nmkdir(dir_name='extra')")
    assert tools.step("done").info["right"] == [False]
