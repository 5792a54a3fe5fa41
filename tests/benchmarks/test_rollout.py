"""The rollout benchmarks' scripts, virtual time, statistics and headlines, on what can be computed by hand; the runs are `make bench`'s."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from benchmarks import asynchrony, latency_spread, redundancy, scheduler
from benchmarks.kolmogorov import ks_test
from benchmarks.rollout.engine import ScriptedEngine
from benchmarks.rollout.script import Play, Turn, parsed, play
from benchmarks.rollout.virtual import VirtualRun, one_by_one
from benchmarks.traces import load
from rollart.control.failures import FailurePolicy
from rollart.control.ledger import Ledger
from rollart.control.quotas import TaskQuota
from rollart.control.staleness import StalenessWindow
from rollart.engines.client import EngineClient
from rollart.types import Attempt, Episode, GenerateRequest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def attempt(index: int, member: int = 0, number: int = 0) -> Attempt:
    return Attempt(Episode("traced", index), member, number)


def run(seconds: list[float], alpha: int, slots: int, train_s: float, steps: int, batch: int, short: str = "wait") -> tuple[list[float], Ledger]:
    """Groups of one that take these seconds in turn, in virtual time."""
    ledger = Ledger([TaskQuota("traced", batch, 1, 1, spread=False)], StalenessWindow(alpha), FailurePolicy(lease_s=1e9), short=short)  # type: ignore[arg-type]
    played = VirtualRun(ledger, lambda a: Play(0.0, (Turn(0.0, seconds[a.episode.index % len(seconds)]),)), slots, train_s).run(steps)
    return played.trained, ledger


def test_taking_turns_costs_the_slowest_and_the_step():
    assert run([1.0, 7.0, 2.0, 3.0], 0, 2, 10.0, 2, 2)[0] == [17.0, 30.0]


def test_side_by_side_rollout_hides_behind_training():
    assert run([1.0, 7.0, 2.0, 3.0], 1, 4, 10.0, 2, 2)[0] == [12.0, 22.0]  # the quickest two, then the others, which were there by then


def test_a_step_that_fills_its_batch_does_not_wait_for_the_slow_which_is_dropped():
    seconds = [1.0, 50.0, 2.0, 3.0]
    waited, of_wait = run(seconds, 1, 4, 10.0, 2, 2)
    filled, of_fill = run(seconds, 1, 4, 10.0, 2, 2, "fill")
    assert waited == [12.0, 60.0] and not of_wait.fates.get("over_age", 0)
    assert filled == [12.0, 23.0] and of_fill.fates.get("over_age", 0) == 1


def test_work_on_slots_ends_in_order_of_what_is_free():
    assert one_by_one([3.0, 1.0, 1.0, 5.0], 2) == [3.0, 1.0, 2.0, 7.0]


def test_another_try_draws_another_reset_and_the_same_response():
    first, second = (play("length_drives_latency", 8, attempt(3, 2, number)) for number in (0, 1))
    assert first.turns == second.turns and first.reset_s != second.reset_s
    trace = load("length_drives_latency")
    assert first.turns[0].generate_s == trace["tokens"][3 * 8 + 2] * trace["seconds_per_token"]
    assert play("resets_and_failures", 8, attempt(0, 1)).reset_s == load("resets_and_failures")["reset_s"][1]


def test_a_request_names_its_attempt():
    assert parsed(f"0/{attempt(12, 3, 1)}/7") == (attempt(12, 3, 1), 7)


def test_kolmogorov_smirnov_values_are_the_published_ones():
    distance, p = ks_test([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5])
    assert distance == 0.25 and p > 0.99
    # at the 5 % point of the limit, 1.3581 / sqrt(n m / (n + m)), which Stephens' correction moves a little
    n = 2000
    shifted = np.arange(n) + 1.3581 * np.sqrt(2 / n) * n
    assert ks_test(list(np.arange(n)), list(shifted))[1] == pytest.approx(0.05, abs=0.002)
    assert ks_test([0.0] * 50, [1.0] * 50)[1] < 1e-12
    with pytest.raises(ValueError, match="0 and 1 values"):
        ks_test([], [1.0])


async def test_with_a_barrier_the_second_turn_waits_for_everybody():
    async with TestClient(TestServer(ScriptedEngine("waits:3x0", 1, 1.0, barrier=2).app())) as client, EngineClient() as http:
        url = str(client.make_url("")).rstrip("/")

        def ask(index: int, turn: int) -> asyncio.Task[Any]:
            return asyncio.create_task(http.generate(url, GenerateRequest(f"0/{attempt(index)}/{turn}", (1,), 4)))

        await ask(0, 0)
        early = ask(0, 1)
        await ask(1, 0)
        assert not early.done()
        await asyncio.gather(early, ask(1, 1))
        result = await ask(2, 0)
        assert result.ids == (97,) and [str(v) for v in result.versions] == ["0-0"]


def test_the_bound_of_latency_spread_is_the_trace_s():
    turns = np.asarray(load("latency_spread_s5")["turn_latency_s"]) + 2
    found = latency_spread.ideal(5)
    assert found["trajectory-level"] == pytest.approx(max(sum(t) for t in turns))
    assert found["batch-level"] == pytest.approx(sum(max(t) for t in turns.T))


def test_a_schedule_without_bubbles_waits_once():
    steps = 3
    assert asynchrony.without_bubbles(steps, 1) - asynchrony.without_bubbles(0, 1) == steps * load("long_tail")["train_s"]
    assert asynchrony.without_bubbles(steps, 1) <= asynchrony.virtual("alpha 2, fill", steps, 1)["seconds"]


def test_what_goes_on_at_one_instant_is_counted_without_what_ends_as_another_starts():
    assert scheduler.at_a_time([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (0.5, 0.75)]) == 2


def test_what_a_trajectory_costs_the_scheduler_is_told_of_the_largest_number():
    cost = {"kind": "cost", "way": "a", "peak_mb": 30.0, "before_mb": 10.0, "after_mb": 15.0}
    rows = [{**cost, "trajectories": 1000, "scheduler_cpu_s": 2.0}, {**cost, "trajectories": 4000, "scheduler_cpu_s": 2.0}]
    found = scheduler.headline(rows)
    assert (found["scheduler_cpu_ms_per_trajectory_1000"], found["scheduler_cpu_ms_per_trajectory"]) == (2.0, 0.5)
    assert (found["scheduler_grew_mb_4000"], found["scheduler_kept_mb_4000"]) == (20.0, 5.0)


@pytest.mark.parametrize("module", [latency_spread, asynchrony, redundancy, scheduler])
def test_every_headline_figure_follows_from_the_rows(module: ModuleType):
    stored = json.loads((RESULTS / f"{module.BENCHMARK.name}.json").read_text())
    assert module.headline(stored["rows"]) == pytest.approx(stored["headline"])
