"""An agent as a Dask task on a worker: its trajectory is durable and scored, the URL is the worker's, and settings that don't fit are refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from distributed import Client, Scheduler, Worker

from rollart.agents.worker import AgentLimits
from rollart.config import ConfigError, parse
from rollart.control.staleness import StalenessWindow
from rollart.engines.router import EngineEntry, EngineTable
from rollart.environments.protocol import AgentResult
from rollart.preparation import check_inputs
from rollart.rollout.dispatcher import Dispatcher, Ended
from rollart.rollout.episode import Limits
from rollart.rollout.reader import StoredTrajectories
from rollart.rollout.window import SubmissionWindow
from rollart.rollout.worker import EnvironmentPlugin, RolloutPlan, TaskPlan
from rollart.types import Attempt, Episode, SamplingTransform
from storage.version import Version


class Asks:
    """Asks once in a thread and once more of its own conversation; `text` is what it begins with."""

    def __init__(self, text: str = "a") -> None:
        self.text = text

    def run(self, seed: int, url: str, key: str) -> AgentResult:
        assert url.startswith("http://127.0.0.1:")
        with openai.OpenAI(base_url=url, api_key=key) as client:
            messages: list[Any] = [{"role": "user", "content": self.text}]
            for _ in range(2):
                answer = client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "b"}]
        return AgentResult(0.5, {"seed": seed})


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
async def test_an_agent_s_attempt_ends_durable_and_scored(engine: str, policy: Path, tmp_path: Path, purpose: Any) -> None:
    task = TaskPlan(
        f"{__name__}:Asks", {"text": "hello"}, Limits(4, 6, 256), SamplingTransform(0.7), "loop", "GENERATE", verifier="environment",
        agent=AgentLimits(run_s=60.0),
    )  # fmt: skip
    plan = RolloutPlan(str(tmp_path), {}, str(policy), 0, 0, StalenessWindow(1), {"asks": task}, SamplingTransform(0.0), flush_s=0.01)
    async with (
        Scheduler(protocol="inproc", dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=2, resources={"PLAY": 4}, dashboard=False) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        await worker.plugin_add(plugin := EnvironmentPlugin(plan), name=EnvironmentPlugin.name)
        plugin.push(EngineTable((EngineEntry(engine, "GENERATE", Version(0, 0)),), 1), 0)
        dispatcher = Dispatcher(client, {"asks": ("PLAY", None)}, "agents-0", SubmissionWindow({"PLAY": 4}))
        attempts = [Attempt(Episode("asks", 0, purpose), member) for member in range(3)]
        dispatcher.dispatch(attempts)
        ends: list[Ended] = []
        async with asyncio.timeout(60):
            async for ended in dispatcher.ended():
                ends += ended
                if len(ends) == len(attempts):
                    break
        await dispatcher.close()
        assert not plugin.playing
    read = StoredTrajectories(str(tmp_path))
    for end in ends:
        assert end.member is not None, end.error
        trajectory = read.read(end.member.receipt)
        assert end.member.score.value == 0.5 and trajectory.outcome == "terminated"
        assert [len(s.turns) for s in trajectory.segments] == [2]
        assert trajectory.segments[0].transform.temperature == (0.7 if purpose == "train" else 0.0)


CONFIG = {
    "hardware": {"all": {"resource": "ALL"}},
    "stages": {"train": "all", "generate": "all", "environment": "all"},
    "policy": {"tiny": {}},
    "train": {"groups": 1},
}


@pytest.mark.parametrize(
    ("task", "rollout", "says"),
    [
        ({}, {}, None),
        ({"agent": {"run_timeout": 500}}, {}, r"rollout.lease: 300 s end before tasks.t.agent.run_timeout \(500 s\) can; raise it"),
        ({"agent": {"run_timeout": 500}}, {"lease": 501}, None),
        ({"agent": {"tool_format": "xml"}}, {}, r"tasks.t.agent.tool_format: unknown tool format 'xml'; known are hermes"),
        ({"environment": "guess_number", "agent": {"requests": 2}}, {}, r"tasks.t.agent: environment 'guess_number' is no agent; leave it out"),
    ],
)
def test_what_a_task_says_of_its_agent_has_to_fit(task: dict[str, Any], rollout: dict[str, Any], says: str | None) -> None:
    config = parse(json.dumps({**CONFIG, "tasks": [{"name": "t", "environment": f"{__name__}:Asks", **task}], "rollout": rollout}))
    if says is None:
        check_inputs(config)
        return
    with pytest.raises(ConfigError, match=says):
        check_inputs(config)


def test_scripted_warm_up_of_an_agent_is_refused() -> None:
    config = parse(json.dumps({**CONFIG, "tasks": [{"name": "t", "environment": f"{__name__}:Asks"}], "warm_up": {"steps": 1, "episodes": {"t": 4}}}))
    with pytest.raises(ConfigError, match=r"warm_up.episodes.t: environment .* has no script\(\) to play by"):
        check_inputs(config)
