"""An agent's whole run: its reward stands with its segments, its limits end it, and what fails is attributed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from rollart.agents.answering import Budget
from rollart.agents.play import AgentRunner
from rollart.agents.rendering import Rendering
from rollart.agents.server import AgentServer, Bounds
from rollart.agents.tool_calls import Hermes
from rollart.control.seeds import environment_seed
from rollart.control.staleness import StalenessWindow
from rollart.environments.calls import CallPool
from rollart.environments.protocol import AgentResult
from rollart.environments.registry import UnknownEnvironment, make, resolve
from rollart.rollout.episode import EpisodeFailed
from rollart.rollout.records import decode, encode
from rollart.types import GenerateRequest, GenerateResult, SamplingTransform, Trajectory
from tests.agents.serving import ATTEMPT, Says, spoken

Run = Callable[[int, str, str], Awaitable[Any]]


class Of:
    """The agent whose run is `run`."""

    def __init__(self, run: Run) -> None:
        self._run, self.closed = run, 0

    async def run(self, seed: int, url: str, key: str) -> AgentResult:
        return await self._run(seed, url, key)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.closed += 1


async def ask(url: str, key: str, text: str, **more: Any) -> str:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="m", messages=[spoken(text)], **more)
    return answer.choices[0].message.content or ""


async def played(rendering: Rendering, agent: Any, generate: Any, **changes: Any) -> Trajectory:
    return await (await runner(rendering, **changes)).play(agent, ATTEMPT, generate)


async def runner(rendering: Rendering, **changes: Any) -> AgentRunner:
    server = AgentServer()
    await server.start()
    settings: dict[str, Any] = {
        "server": server, "rendering": rendering, "tool_format": Hermes(), "budget": Budget(8, 12, 512), "bounds": Bounds(), "run_s": 20.0,
        "transform": SamplingTransform(0.7), "run_seed": 5, "lineage": 2,
    }  # fmt: skip
    return AgentRunner(**{**settings, **changes})


async def test_a_run_is_a_trajectory_with_its_segments_its_reward_and_what_the_agent_says_of_it(rendering: Rendering) -> None:
    given: list[tuple[int, str]] = []

    async def run(seed: int, url: str, key: str) -> AgentResult:
        given.append((seed, key))
        await ask(url, key, "a", temperature=0.1)
        await ask(url, key, "b")
        return AgentResult(0.75, {"found": 3})

    agent, says = Of(run), Says(rendering, "one", "two")
    trajectory = await played(rendering, agent, says)
    assert given[0][0] == trajectory.seed == environment_seed(5, ATTEMPT.episode) and agent.closed == 1
    assert trajectory.outcome == "terminated" and trajectory.environment_reward == 0.75 and len(trajectory.segments) == 2
    assert trajectory.info == {"found": 3, "action": "two", "actions": ["one", "two"], "ignored_parameters": {"temperature": 1}}
    assert [r.rid for r in says.asked] == [f"2/{ATTEMPT}/0", f"2/{ATTEMPT}/1"] and says.asked[0].transform.temperature == 0.7
    (stored,) = decode(encode([trajectory]))
    assert stored == trajectory
    assert trajectory.seconds["total"] >= trajectory.seconds["generate"] > 0


async def test_a_plain_function_runs_in_a_thread_of_its_own(rendering: Rendering) -> None:
    class Blocks:
        """Has no close, which is optional."""

        def run(self, seed: int, url: str, key: str) -> AgentResult:
            self.thread = threading.get_ident()
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                said = client.responses.create(model="m", input="a").output_text
            return AgentResult(float(said == "one"), truncated=True)

    agent = Blocks()
    trajectory = await played(rendering, agent, Says(rendering, "one"))
    assert trajectory.environment_reward == 1.0 and trajectory.outcome == "truncated" and agent.thread != threading.get_ident()


async def test_sub_agents_at_once_are_one_trajectory(rendering: Rendering) -> None:
    async def run(seed: int, url: str, key: str) -> AgentResult:
        await asyncio.gather(*(ask(url, key, f"part {n}") for n in range(4)))
        return AgentResult(1.0)

    trajectory = await played(rendering, Of(run), Says(rendering, *"abcd"))
    assert len(trajectory.segments) == 4 and trajectory.environment_reward == 1.0 and len(trajectory.turns) == 4


@pytest.mark.parametrize("gives_up", [True, False])
async def test_an_agent_that_has_used_up_its_tokens_is_over_length_whether_it_raises_or_ends(rendering: Rendering, gives_up: bool) -> None:
    async def run(seed: int, url: str, key: str) -> AgentResult:
        await ask(url, key, "a")
        try:
            await ask(url, key, "a" * 200)
        except openai.BadRequestError:
            if gives_up:
                raise
        return AgentResult(0.5)

    trajectory = await played(rendering, Of(run), Says(rendering, "one"), budget=Budget(8, 12, 60))
    assert trajectory.outcome == "over_length" and trajectory.environment_reward == (0.0 if gives_up else 0.5)
    assert ("error" in trajectory.info) == gives_up


async def test_an_agent_that_has_had_its_responses_is_truncated(rendering: Rendering) -> None:
    async def run(seed: int, url: str, key: str) -> AgentResult:
        for text in "abc":
            await ask(url, key, text)
        raise AssertionError

    assert (await played(rendering, Of(run), Says(rendering, *"abc"), budget=Budget(2, 12, 600))).outcome == "truncated"


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "agent returned NoneType from run, where an AgentResult is needed"), (AgentResult(float("nan")), "agent returned reward nan"),
        (AgentResult(0.0, {"x": {1}}), "no JSON"), (KeyError("key"), "agent raised in run: KeyError: 'key'"),
        (SystemExit(3), "agent raised in run: .*SystemExit: 3"),
    ],
)  # fmt: skip
async def test_what_the_agent_s_code_gets_wrong_is_its_own_failure(rendering: Rendering, returned: Any, says: str) -> None:
    async def run(seed: int, url: str, key: str) -> AgentResult:
        await ask(url, key, "a")
        if isinstance(returned, BaseException):
            raise returned
        return returned  # type: ignore[no-any-return]

    agent = Of(run)
    with pytest.raises(EpisodeFailed, match=says) as failed:
        await played(rendering, agent, Says(rendering, "one"))
    assert failed.value.cause == "environment" and agent.closed == 1


async def test_a_run_without_a_response_can_not_be_scored_and_says_what_to_change(rendering: Rendering) -> None:
    async def silent(seed: int, url: str, key: str) -> AgentResult:
        return AgentResult(1.0)

    async def wordy(seed: int, url: str, key: str) -> AgentResult:
        await ask(url, key, "a" * 1000)
        raise AssertionError

    with pytest.raises(EpisodeFailed, match="agent ended without a response"):
        await played(rendering, Of(silent), Says(rendering))
    with pytest.raises(EpisodeFailed, match=r"tasks.chat.max_tokens: the first prompt leaves no room"):
        await played(rendering, Of(wordy), Says(rendering))


async def test_a_run_that_is_over_its_limit_fails_and_its_url_is_dead(rendering: Rendering) -> None:
    urls: list[tuple[str, str]] = []

    async def run(seed: int, url: str, key: str) -> AgentResult:
        urls.append((url, key))
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(EpisodeFailed, match=r"run took longer than 0.2 s \(tasks.chat.agent.run_timeout\)"):
        await played(rendering, Of(run), Says(rendering), run_s=0.2)
    with pytest.raises(openai.NotFoundError):
        await ask(*urls[0], "a")


async def test_a_thread_that_outlasts_the_limit_is_left_behind_and_closed_when_it_is_back(rendering: Rendering) -> None:
    class Hangs:
        def __init__(self) -> None:
            self.free, self.closed = threading.Event(), threading.Event()
            self.error: Exception | None = None

        def run(self, seed: int, url: str, key: str) -> AgentResult:
            self.free.wait(20)
            try:
                with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                    client.models.list()
            except openai.NotFoundError as error:
                self.error = error
            return AgentResult(1.0)

        def close(self) -> None:
            self.closed.set()

    agent, pool = Hangs(), CallPool()
    with pytest.raises(EpisodeFailed, match="run took longer"):
        await played(rendering, agent, Says(rendering), run_s=0.1, pool=pool)
    assert pool.left == 1 and not agent.closed.is_set()
    agent.free.set()
    assert await asyncio.to_thread(agent.closed.wait, 20) and agent.error is not None and pool.left == 0


async def test_an_engine_that_fails_ends_the_run_at_once_as_the_generation_s_failure(rendering: Rendering) -> None:
    ended = asyncio.Event()

    async def run(seed: int, url: str, key: str) -> AgentResult:
        try:
            while True:  # as an agent would that takes an error for a pause
                try:
                    await ask(url, key, "a")
                except openai.InternalServerError:
                    await asyncio.sleep(0.01)
        finally:
            ended.set()

    async def generate(request: GenerateRequest) -> GenerateResult:
        raise EpisodeFailed("no engine was announced", "generation")

    with pytest.raises(EpisodeFailed, match="no engine was announced") as failed:
        await played(rendering, Of(run), generate)
    assert failed.value.cause == "generation" and ended.is_set()


async def test_a_newer_version_stops_over_age_work_with_what_there_is_of_it(rendering: Rendering) -> None:
    says, waiting = Says(rendering, "one"), asyncio.Event()

    async def generate(request: GenerateRequest) -> GenerateResult:
        if not says.asked:
            return await says(request)  # of version 4
        waiting.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def run(seed: int, url: str, key: str) -> AgentResult:
        await ask(url, key, "a")
        await ask(url, key, "b")
        raise AssertionError

    agent, playing = Of(run), await runner(rendering, window=StalenessWindow(1))
    task = asyncio.create_task(playing.play(agent, ATTEMPT, generate))
    await waiting.wait()
    assert not playing.stop_for_age(5) and not task.done()
    assert playing.stop_for_age(6) and not playing.stop_for_age(6)
    trajectory = await task
    assert trajectory.outcome == "over_age" and len(trajectory.segments) == 1 and trajectory.version_span == (4, 4) and agent.closed == 1


async def test_a_run_that_is_cancelled_from_outside_ends_as_that(rendering: Rendering) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def run(seed: int, url: str, key: str) -> AgentResult:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    agent = Of(run)
    task = asyncio.create_task(played(rendering, agent, Says(rendering)))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set() and agent.closed == 1


def test_the_registry_takes_an_agent_by_its_import_path_and_says_what_one_lacks() -> None:
    assert resolve(f"{__name__}:Of") is Of
    assert make(f"{__name__}:Of", run=None).closed == 0  # type: ignore[union-attr]
    with pytest.raises(UnknownEnvironment, match=r"is no environment class, and without run\(\) no agent; it lacks reset, step, close"):
        resolve("rollart.agents.tool_calls:Hermes")
