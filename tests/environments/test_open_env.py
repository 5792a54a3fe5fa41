"""A remote environment, on a real OpenEnv server in a process of its own."""

import os
import subprocess
from pathlib import Path

import pytest

from rollart.environments.open_env import RemoteFailed
from rollart.environments.registry import EnvironmentSettingsError, make


@pytest.fixture(scope="module")
def url():
    python = os.environ.get("OPENENV_PYTHON", "")  # its pins don't fit beside rollart's
    if not python:
        pytest.skip("OPENENV_PYTHON names no interpreter that has openenv (make environments makes one)")
    server = subprocess.Popen([python, Path(__file__).with_name("open_env_server.py")], stdout=subprocess.PIPE, text=True)
    line = next((line for line in server.stdout if line.startswith("port ")), "")
    assert line, "the server has ended"
    yield f"http://127.0.0.1:{line.split()[1]}"
    server.terminate()
    server.wait(20)


async def test_an_episode_by_hand_and_seeds(url):
    remote = make("openenv", url=url, observation_field="text")
    assert [await remote.reset(seed) for seed in (0, 1, 2, 1)] == ["count to 2\n", "count to 3\n", "count to 4\n", "count to 3\n"]
    await remote.reset(0)
    first, wrong, last = [await remote.step(action) for action in ("1", "7", "2")]
    assert (first.observation, first.reward, first.terminated) == ("at 1\n", 0.0, False)
    assert wrong.observation == "at 1\n"
    assert (last.observation, last.reward, last.terminated) == ("", 1.0, True)
    await remote.close()


async def test_two_sessions_at_once_are_two_episodes(url):
    one, two = (make("openenv", url=url, observation_field="text") for _ in range(2))
    assert (await one.reset(0), await two.reset(1)) == ("count to 2\n", "count to 3\n")
    await one.step("1")
    assert (await two.step("x")).observation == "at 0\n"
    await one.close()
    await two.close()


async def test_what_is_no_action_is_scored(url):
    remote = make("openenv", url=url, observation_field="text", turns=3)
    await remote.reset(0)
    long = await remote.step("x" * 101)
    assert (long.reward, long.info["valid"], long.terminated) == (0.0, False, False) and long.observation.startswith("invalid: VALIDATION_ERROR")
    assert (await remote.step("")).observation == "at 0\n"
    assert (await remote.step("1")).truncated
    await remote.close()
    structured = make("openenv", url=url, action_field="")
    await structured.reset(0)
    for text in ("{", "[1]", "[" * 100_000, "x"):
        assert (await structured.step(text)).observation == "invalid: no JSON object\n"
    assert not (await structured.step('{"massage": "1"}')).info["valid"]
    assert '"text": "at 1"' in (await structured.step('{"message": "1"}')).observation
    await structured.close()


async def test_what_fails_in_the_environment_is_raised(url):
    remote = make("openenv", url=url, observation_field="text")
    await remote.reset(0)
    with pytest.raises(RemoteFailed, match="EXECUTION_ERROR"):
        await remote.step("break")
    await remote.close()
    other = make("openenv", url=url, observation_field="sound")
    with pytest.raises(RemoteFailed, match=r"has no 'sound', but .*text"):
        await other.reset(0)
    await other.close()


async def test_a_server_that_is_not_there_is_told():
    remote = make("openenv", url="http://127.0.0.1:1")
    with pytest.raises(RemoteFailed, match=r"http://127\.0\.0\.1:1 opened no session"):
        await remote.reset(0)
    await remote.close()


def test_what_is_no_http_url_is_refused():
    with pytest.raises(EnvironmentSettingsError, match="begins with http"):
        make("openenv", url="localhost:8000")
