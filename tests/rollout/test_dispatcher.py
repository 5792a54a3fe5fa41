"""Attempts as futures on a real scheduler: scored, failed or cancelled, each end reported once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker

from benchmarks.byte_policy import byte_policy
from rollart.control.staleness import StalenessWindow
from rollart.engines.router import EngineEntry, EngineTable
from rollart.environments.catalogue import SHIPPED, Entry
from rollart.environments.protocol import StepResult
from rollart.fence import Superseded
from rollart.rewards.protocol import Verdict
from rollart.rewards.worker import RewardPlugin
from rollart.rollout.coordinator import RolloutFailed
from rollart.rollout.dispatcher import Dispatcher, Ended, Stalled
from rollart.rollout.episode import EpisodeFailed, Limits
from rollart.rollout.evaluation import evaluate_version
from rollart.rollout.reader import StoredTrajectories
from rollart.rollout.window import SubmissionWindow
from rollart.rollout.worker import EnvironmentPlugin, RolloutPlan, TaskPlan, push_table
from rollart.rollout.writer import TrajectoryWriter
from rollart.types import NOT_SAMPLED, Attempt, Episode, SamplingTransform, Trajectory
from storage.version import Version

PATIENCE_S = 20.0


class Scripted:
    """Plays itself, and scores 1 in its only turn."""

    async def reset(self, seed: int) -> str:
        return "say x"

    async def step(self, action: str) -> StepResult:
        return StepResult("", 1.0, terminated=True)

    async def close(self) -> None:
        return None

    def script(self, rng: random.Random) -> str:
        return "x"


class Broken(Scripted):
    async def reset(self, seed: int) -> str:
        raise OSError("the simulator is gone")


class Unpackable(Exception):
    """As clients of services raise it: with a lock of theirs in it, and a whole page as its text."""

    def __init__(self) -> None:
        super().__init__("page " * 10_000)
        self.lock = threading.Lock()


class Wordy(Scripted):
    async def reset(self, seed: int) -> str:
        raise Unpackable


class Endless(Scripted):
    """Starts, says so in `resets`, and never goes on."""

    resets: asyncio.Queue[int]
    closed: asyncio.Semaphore

    async def reset(self, seed: int) -> str:
        self.resets.put_nowait(seed)
        await asyncio.Event().wait()
        return ""

    async def close(self) -> None:
        self.closed.release()


def out_of_order(trajectory: Trajectory) -> Verdict:
    raise OSError("the judge is out of order")


@dataclass
class Cluster:
    """A scheduler and one worker with both resources, in this process, and a dispatcher on them."""

    scheduler: Scheduler
    client: Client
    dispatcher: Dispatcher
    plugin: EnvironmentPlugin
    window: SubmissionWindow

    async def ends(self, count: int) -> list[Ended]:
        """The next `count` ends."""
        found: list[Ended] = []
        async with asyncio.timeout(PATIENCE_S):
            async for ended in self.dispatcher.ended():
                found += ended
                if len(found) >= count:
                    break
        return found


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    kinds = {"frozen_lake": Scripted, "broken": Broken, "endless": Endless, "wordy": Wordy, "here": Scripted, "unjudged": Scripted}
    verifiers = {"here": "environment", "unjudged": f"{__name__}:out_of_order"}
    for name, kind in kinds.items():
        monkeypatch.setitem(SHIPPED, name, Entry(name, f"{__name__}:{kind.__name__}"))
    monkeypatch.setattr(Endless, "resets", asyncio.Queue(), raising=False)
    monkeypatch.setattr(Endless, "closed", asyncio.Semaphore(0), raising=False)
    tasks = {n: TaskPlan(n, {}, Limits(1, 4, 64), SamplingTransform(), "loop", "GENERATE", verifier=verifiers.get(n)) for n in kinds}
    plan = RolloutPlan(
        str(tmp_path), {}, byte_policy(tmp_path / "policy"), 0, 0, StalenessWindow(1), tasks, SamplingTransform(), flush_s=0.01, begun_topic="begun"
    )  # fmt: skip
    resources = {kind: ("PLAY", None if kind in verifiers else "JUDGE") for kind in kinds}
    async with (
        Scheduler(protocol="inproc", dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=8, resources={"PLAY": 6, "JUDGE": 2}, dashboard=False) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        await worker.plugin_add(plugin := EnvironmentPlugin(plan), name=EnvironmentPlugin.name)
        await worker.plugin_add(RewardPlugin(str(tmp_path), {}, dict.fromkeys(kinds, "environment")), name=RewardPlugin.name)
        window = SubmissionWindow({"PLAY": 6})
        dispatcher = Dispatcher(client, resources, "train-20261130-101500-0-ab12cd", window)  # as a run has it that was given no name
        yield Cluster(scheduler, client, dispatcher, plugin, window)
        await dispatcher.close()


def plays(task: str, count: int) -> list[Attempt]:
    return [Attempt(Episode(task, i, "warm_up"), 0) for i in range(count)]


def tried(ends: Sequence[Ended]) -> list[Attempt]:
    return sorted(e.attempt for e in ends)


@pytest.mark.parametrize("task", ["frozen_lake", "here"], ids=["score apart", "score in the trajectory's task"])
async def test_each_attempt_ends_once_scored_with_its_own_durable_trajectory(cluster: Cluster, tmp_path: Path, task: str) -> None:
    attempts = plays(task, 20)
    cluster.dispatcher.dispatch(attempts)
    assert cluster.dispatcher.in_flight == 20
    ends = await cluster.ends(20)
    assert tried(ends) == attempts and cluster.dispatcher.in_flight == 0
    read = StoredTrajectories(str(tmp_path))
    for end in ends:
        assert end.member is not None and end.error is None
        assert end.member.receipt.attempt == end.attempt and end.member.score.value == 1.0
        assert read.read(end.member.receipt).info["actions"] == ["x"]


async def test_a_score_that_comes_with_its_trajectory_costs_no_task_of_its_own(cluster: Cluster) -> None:
    cluster.dispatcher.dispatch(plays("here", 3))
    (futures, *_) = cluster.dispatcher._futures.values()
    assert [f.key.partition("-")[0] for f in futures] == ["trajectory"]
    assert len(await cluster.ends(3)) == 3


async def test_a_verifier_that_fails_in_the_trajectorys_task_is_a_failure_of_the_reward_and_no_score(cluster: Cluster) -> None:
    cluster.dispatcher.dispatch(plays("unjudged", 1))
    (end,) = await cluster.ends(1)
    assert (end.member, end.cause) == (None, "reward")
    assert "OSError: the judge is out of order" in str(end.error)


async def test_what_waits_for_room_is_taken_back_and_its_room_given_to_others(cluster: Cluster) -> None:
    stuck, waiting, good = plays("endless", 8), plays("frozen_lake", 5), plays("here", 4)  # six slots: eight go out
    out: list[Attempt] = []
    cluster.dispatcher.hear(out.extend)
    for of_task in (stuck, waiting, good):
        cluster.dispatcher.dispatch(of_task)
    for _ in range(6):
        await asyncio.wait_for(Endless.resets.get(), PATIENCE_S)
    assert cluster.window.waiting() == {"PLAY": 9}
    assert out == stuck and cluster.dispatcher.waiting() == [*waiting, *good]
    await cluster.dispatcher.cancel([*stuck, *waiting])
    assert tried(await cluster.ends(4)) == good
    assert out == [*stuck, *good] and cluster.dispatcher.waiting() == []
    assert cluster.window.waiting() == {}
    assert not [k for k in cluster.scheduler.tasks if "frozenlake" in str(k)], "they never reached the scheduler"


async def test_the_workers_tell_which_attempts_have_begun_to_sample(cluster: Cluster) -> None:
    told: asyncio.Queue[Attempt] = asyncio.Queue()
    cluster.dispatcher.follow("begun", lambda attempts: [told.put_nowait(a) for a in attempts])
    attempts = [Attempt(Episode("frozen_lake", i), member) for i in range(2) for member in range(2)]
    late = [Attempt(Episode("endless", 0), 0)]
    for of_task in (attempts, late):
        cluster.dispatcher.dispatch(of_task)
    cluster.plugin.push(EngineTable((EngineEntry("http://127.0.0.1:9", "GENERATE", Version(0, 0)),), 1), 0)
    async with asyncio.timeout(PATIENCE_S):
        begun = {await told.get() for _ in attempts}
    assert begun == set(attempts) and told.empty()  # though no engine has answered; the one that still starts has not begun


async def test_a_table_of_another_coordinator_than_the_workers_own_is_refused(cluster: Cluster) -> None:
    cluster.plugin.plan = replace(cluster.plugin.plan, coordinator=5)
    table = EngineTable((EngineEntry("http://127.0.0.1:9", "GENERATE", Version(0, 0)),), 1, coordinator=4)
    with pytest.raises(Superseded, match="coordinator 4 of this run is superseded by coordinator 5"):
        await cluster.client.run(push_table, table, 3)
    assert cluster.plugin.shared is not None and (cluster.plugin.shared.table, cluster.plugin.shared.newest) == (None, NOT_SAMPLED)
    await cluster.client.run(push_table, replace(table, coordinator=5), 3)
    assert cluster.plugin.shared.newest == 3


async def test_what_failed_is_reported_with_its_own_error_beside_what_did_not(cluster: Cluster) -> None:
    bad, good = plays("broken", 3), plays("frozen_lake", 3)
    cluster.dispatcher.dispatch(bad)
    cluster.dispatcher.dispatch(good)
    ends = await cluster.ends(6)
    assert tried([e for e in ends if e.member is not None]) == good
    failed = [e for e in ends if e.member is None]
    assert tried(failed) == bad
    assert all(isinstance(e.error, EpisodeFailed) and "reset: OSError: the simulator is gone" in str(e.error) for e in failed)


async def test_an_error_that_came_of_one_that_cannot_be_packed_and_says_too_much_arrives_as_what_it_is(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.dispatcher.dispatch(plays("wordy", 1))
    (end,) = await cluster.ends(1)
    assert isinstance(end.error, EpisodeFailed) and end.cause == "environment"
    assert str(end.error).startswith("environment raised in reset: Unpackable: page page") and len(str(end.error)) < 5000
    assert end.error.__cause__ is None
    assert "Traceback" not in capsys.readouterr().err


async def test_what_is_cancelled_is_forgotten_by_the_scheduler_and_its_end_not_reported(cluster: Cluster) -> None:
    stuck = plays("endless", 3)
    cluster.dispatcher.dispatch(stuck)
    for _ in stuck:
        await asyncio.wait_for(Endless.resets.get(), PATIENCE_S)
    await cluster.dispatcher.cancel(stuck[:2])
    assert list(cluster.dispatcher.keys()) == stuck[2:]
    good = plays("frozen_lake", 4)
    cluster.dispatcher.dispatch(good)
    assert tried(await cluster.ends(4)) == good
    keys = [str(k) for k in cluster.scheduler.tasks]
    assert sorted(k.partition("-")[0] for k in keys if "endless" in k) == ["reward", "trajectory"]  # the third's
    await cluster.dispatcher.close()
    assert cluster.dispatcher.in_flight == 0


async def test_what_the_cluster_cancels_ends_with_an_error_that_says_so(cluster: Cluster) -> None:
    (stuck,) = plays("endless", 1)
    cluster.dispatcher.dispatch([stuck])
    await asyncio.wait_for(Endless.resets.get(), PATIENCE_S)
    await cluster.client.cancel([f for pair in cluster.dispatcher._futures.values() for f in pair], force=True)
    (end,) = await cluster.ends(1)
    assert end.attempt == stuck and end.member is None and "cancelled" in str(end.error)


async def test_an_evaluation_in_which_nothing_ends_says_what_it_waits_for(cluster: Cluster) -> None:
    class Silent(Dispatcher):
        def dispatch(self, attempts: Sequence[Attempt]) -> None:
            super().dispatch([Attempt(Episode(a.episode.task, a.episode.index, "warm_up"), a.member) for a in attempts])  # no engine is needed

    silent = Silent(cluster.client, {"endless": ("PLAY", "JUDGE")}, "silent", SubmissionWindow({"PLAY": 6}))
    with pytest.raises(Stalled, match=r"\(run.step_timeout\); 2 in flight, such as warm_up/endless/0/0/0; look at"):
        await asyncio.wait_for(evaluate_version(silent, Version(0, 0), ["endless"], 2, 3, stall_s=0.2), PATIENCE_S)
    await silent.close()


async def test_an_evaluation_fails_for_good_only_when_as_many_have_failed_in_a_row_as_one_loss_may_take(cluster: Cluster) -> None:
    with pytest.raises(RolloutFailed, match=r"^70 evaluation attempts in a row failed; the last, .*the simulator is gone"):
        await asyncio.wait_for(evaluate_version(cluster.dispatcher, Version(0, 0), ["broken"], 70, 3), PATIENCE_S)


async def test_another_try_and_another_dispatcher_share_no_result(cluster: Cluster) -> None:
    (attempt,) = plays("frozen_lake", 1)
    cluster.dispatcher.dispatch([attempt])
    cluster.dispatcher.dispatch([attempt.retried()])
    first = await cluster.ends(2)
    dispatcher = Dispatcher(cluster.client, {"frozen_lake": ("PLAY", "JUDGE")}, "another", SubmissionWindow({"PLAY": 6}))
    other = Cluster(cluster.scheduler, cluster.client, dispatcher, cluster.plugin, cluster.window)
    other.dispatcher.dispatch([attempt])
    nonces = [e.member.receipt.nonce for e in first + await other.ends(1) if e.member is not None]
    assert len(set(nonces)) == 3


async def test_the_dashboard_names_tasks_by_stage_and_task_whatever_the_run_is_called(cluster: Cluster) -> None:
    cluster.dispatcher.dispatch(plays("endless", 2))
    cluster.dispatcher.dispatch(plays("frozen_lake", 1))
    await cluster.ends(1)
    await asyncio.wait_for(Endless.resets.get(), PATIENCE_S)
    assert set(cluster.scheduler.task_prefixes) == {f"{stage}-{task}" for stage in ("trajectory", "reward") for task in ("endless", "frozenlake")}


async def test_what_is_cancelled_while_results_come_is_not_reported_and_breaks_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = plays("frozen_lake", 3)
    gather = cluster.client.gather

    async def cancelled_meanwhile(*given: Any, **how: Any) -> Any:
        found = await gather(*given, **how)
        await cluster.dispatcher.cancel(attempts[:1])
        return found

    monkeypatch.setattr(cluster.client, "gather", cancelled_meanwhile)
    cluster.dispatcher.dispatch(attempts)
    assert tried(await cluster.ends(2)) == attempts[1:]


async def test_what_is_cancelled_between_its_end_and_the_fetching_of_results_breaks_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = plays("frozen_lake", 3)
    fetch, cancelling = cluster.dispatcher._fetch, []

    def cancelled_first() -> None:
        cancelling.append(asyncio.create_task(cluster.dispatcher.cancel(attempts[:1])))  # begins before what `fetch` starts
        fetch()

    monkeypatch.setattr(cluster.dispatcher, "_fetch", cancelled_first)
    cluster.dispatcher.dispatch(attempts)
    assert tried(await cluster.ends(2)) == attempts[1:]
    await asyncio.gather(*cancelling)


async def test_what_is_cancelled_stops_and_leaves_its_slot_to_others(cluster: Cluster) -> None:
    stuck = plays("endless", 6)  # as many as the worker has slots
    cluster.dispatcher.dispatch(stuck)
    for _ in stuck:
        await asyncio.wait_for(Endless.resets.get(), PATIENCE_S)
    await cluster.dispatcher.cancel(stuck)
    for _ in stuck:
        await asyncio.wait_for(Endless.closed.acquire(), PATIENCE_S)
    good = plays("frozen_lake", 2)
    cluster.dispatcher.dispatch(good)
    assert tried(await cluster.ends(2)) == good


async def test_what_is_in_flight_is_told_with_what_its_worker_is_at_and_can_be_failed(cluster: Cluster) -> None:
    stuck = plays("endless", 8)  # six slots: eight go out
    cluster.dispatcher.dispatch(stuck)
    cluster.dispatcher.dispatch(plays("here", 2))
    for _ in range(6):
        await asyncio.wait_for(Endless.resets.get(), PATIENCE_S)
    told = await cluster.dispatcher.whereabouts()
    assert told.startswith("8 scripted plays of endless on worker ") and told.endswith(
        ": 6 in reset, 2 waiting for a slot; 2 scripted plays of here: held back until others end"
    )
    assert cluster.dispatcher.held() == {"PLAY": 2}
    assert [len(keys) for keys in cluster.dispatcher.keys().values()] == [2] * 8 + [0] * 2
    await cluster.dispatcher.fail([*stuck, stuck[0].retried()], OSError("nobody has it"))
    ends = await cluster.ends(10)
    failed = [e for e in ends if e.member is None]
    assert tried(failed) == stuck and {(e.cause, str(e.error)) for e in failed} == {("machine", "nobody has it")}
    assert tried([e for e in ends if e.member is not None]) == plays("here", 2)


async def test_a_worker_tells_when_what_was_played_is_written_and_forgets_what_is_over(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float] | None] = []
    write = TrajectoryWriter.write

    async def watched(writer: TrajectoryWriter, trajectory: Trajectory) -> tuple[str, int]:
        seen.append(cluster.plugin.doing(trajectory.attempt))
        return await write(writer, trajectory)

    monkeypatch.setattr(TrajectoryWriter, "write", watched)
    (attempt,) = plays("here", 1)
    cluster.dispatcher.dispatch([attempt])
    await cluster.ends(1)
    assert [said[0] for said in seen if said] == ["being written"] and cluster.plugin.doing(attempt) is None
