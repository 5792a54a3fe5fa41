"""What a run says of itself: the lines of a step, an evaluation and the stages, token counts and memory."""

import asyncio
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollart import telemetry as module
from rollart.control.tallies import Tallies, Tally
from rollart.dashboard.metrics import MetricsWriter, read_metrics
from rollart.dashboard.progress import Progress
from rollart.dashboard.status import RunStatus
from rollart.rollout.evaluation import Evaluation
from rollart.telemetry import Telemetry, memory_in_use
from rollart.training.metrics import StepMetrics
from rollart.types import Attempt, Batch, Episode, Group, Member, Purpose, Receipt, Score, Version


def member(task: str, index: int, place: int, version: int, score: float, start: float = 0.0, purpose: Purpose = "train") -> Member:
    attempt = Attempt(Episode(task, index, purpose), place)
    receipt = Receipt(attempt, f"n{index}", 0, "f", 0, "terminated", version, version, 9, 4, 2, {"start": start, "total": 2.0})
    return Member(receipt, Score(attempt, receipt.nonce, score))


@pytest.fixture
def heard() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def telemetry(tmp_path: Path, heard: io.StringIO) -> Iterator[Telemetry]:
    with MetricsWriter(str(tmp_path)) as metrics:
        yield Telemetry(metrics, Progress("plain", heard), RunStatus(steps=9))


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(str(folder)) if line["kind"] == kind]


BATCH = Batch(
    0, 4,
    (
        Group(Episode("lake", 0), (member("lake", 0, 0, 3, 1.0), member("lake", 0, 1, 4, 0.0))),
        Group(Episode("sums", 0), (member("sums", 0, 0, 4, 0.5), member("sums", 0, 1, 4, 0.5))),
    ),
)  # fmt: skip
TALLIES = Tallies(("lake", "sums"), {"lake": {"trained": Tally(2, 2, 8, 3.0)}, "sums": {"no_signal": Tally(2, 2, 4, 1.0)}})
TAUGHT = replace(BATCH, groups=BATCH.groups[:1])


def test_a_step_writes_its_reward_staleness_fates_and_tokens(telemetry: Telemetry, tmp_path: Path, heard: io.StringIO) -> None:
    telemetry.status.in_flight = 12
    telemetry.step(
        BATCH, TAUGHT, StepMetrics(4, loss=0.25, tokens=8, seconds=1.5), TALLIES, "0-5", wait_s=0.5, waited={"lake": 0.25}, ends={"scored": 4}
    )
    (line,) = lines(tmp_path, "step")
    assert {k: line[k] for k in ("step", "version", "seconds", "reward", "staleness", "fates", "tokens", "in_flight")} == {
        "step": 5, "version": "0-5", "seconds": {"wait": 0.5, "train": 1.5}, "reward": {"lake": 0.5, "sums": 0.5},
        "staleness": {"1": 1, "0": 3}, "fates": {"trained": 2, "no_signal": 2}, "tokens": {"trained": 8, "generated": 0}, "in_flight": 12,
    }  # fmt: skip
    assert line["train"]["loss"] == 0.25
    assert (line["groups"], line["waited"]) == ({"lake": 1, "sums": 1}, {"lake": 0.25})
    assert line["by_task"]["lake"] == {"trained": {"members": 2, "played": 2, "sampled": 8, "seconds": 3.0, "outlasted": 0}}
    assert (telemetry.status.step, telemetry.status.version) == (5, "0-5")
    assert telemetry.status.staleness == {1: 1, 0: 1}  # of those with signal: nothing else was trained on
    telemetry.step(BATCH, TAUGHT, StepMetrics(4), Tallies(()), "0-5", wait_s=0.0, waited={}, ends={})
    assert telemetry.status.staleness == {1: 2, 0: 2}
    assert "5/9" in heard.getvalue()


def test_a_disagreement_of_trainer_and_engine_is_said_to_whoever_watches(telemetry: Telemetry, heard: io.StringIO) -> None:
    telemetry.step(
        BATCH, TAUGHT, StepMetrics(4, alarms=("trainer and engine disagree",), drift_alarm=1), Tallies(()), "0-5", wait_s=0.0, waited={}, ends={}
    )
    assert "step 5: trainer and engine disagree" in heard.getvalue()


def test_an_evaluation_writes_means_and_counts_and_says_what_could_not_be_measured(telemetry: Telemetry, tmp_path: Path, heard: io.StringIO) -> None:
    played = tuple(member("lake", i, 0, 4, float(i == 0), purpose="evaluate") for i in range(4))
    void = (Episode("sums", 0, "evaluate"),)
    telemetry.evaluation(4, Evaluation(Version(0, 4), played, void, "evaluate/sums/0/0/2: the engine is gone"), ["lake", "sums"])
    (line,) = lines(tmp_path, "evaluation")
    assert (line["step"], line["version"], line["void"]) == (4, "0-4", 1)
    assert line["reward"] == {"lake": {"mean": 0.25, "n": 4}, "sums": {"mean": None, "n": 0}}
    assert "evaluation of version 0-4 on 4 held-out episodes: lake 0.250" in heard.getvalue()
    assert "1 episodes could not be evaluated; the last: evaluate/sums/0/0/2: the engine is gone" in " ".join(heard.getvalue().split())


def test_stages_and_trajectories_become_intervals_once(telemetry: Telemetry, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), telemetry.stage("train"):
        raise RuntimeError("a stage that fails took its time all the same")
    for start in (10.0, 11.0, 20.0):
        telemetry.observe(member("lake", 0, 0, 0, 1.0, start))
    telemetry.step(BATCH, TAUGHT, StepMetrics(4), Tallies(()), "0-5", wait_s=0.0, waited={}, ends={})
    telemetry.end("done")
    (line,) = lines(tmp_path, "intervals")
    (name, start, end), *rollout = line["intervals"]
    assert name == "train" and start <= end
    assert rollout == [["rollout", 10.0, 13.0], ["rollout", 20.0, 22.0]]
    (last,) = lines(tmp_path, "end")
    assert last["state"] == "done" and last["seconds"] >= 0


def test_the_reward_shown_is_that_of_the_last_trajectories_of_each_task(telemetry: Telemetry) -> None:
    for i in range(module.RECENT + 16):
        telemetry.observe(member("lake", i, 0, 0, float(i >= 48)))
    telemetry.observe(member("sums", 0, 0, 0, -1.0))
    telemetry.show()
    assert telemetry.status.reward == {"lake": 0.5, "sums": -1.0}
    assert telemetry.status.finished == module.RECENT + 17


async def sampled(telemetry: Telemetry, counts: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes one sample a count, a second apart by the telemetry's clock."""
    clock = iter(range(1000, 2000))
    monkeypatch.setattr(module.time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(module, "SAMPLE_S", 0.0)
    left, through = list(counts), asyncio.Event()

    async def tokens() -> int | None:
        if not left:
            through.set()
            await asyncio.Event().wait()
        return left.pop(0)

    task = asyncio.create_task(telemetry.sample(tokens, lambda: 7, lambda: "2 groups of lake"))
    await asyncio.wait_for(through.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_sampling_notes_tokens_memory_and_what_is_awaited(telemetry: Telemetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await sampled(telemetry, [100, None, 400], monkeypatch)
    assert (telemetry.status.in_flight, telemetry.status.awaited) == (7, "2 groups of lake")
    assert telemetry.status.tokens_per_second > 0
    telemetry.end("done")
    (line,) = lines(tmp_path, "tokens")
    assert [count for _, count in line["samples"]] == [100, 400]  # an engine that did not answer is no zero
    assert lines(tmp_path, "end")[0]["peak_memory"] > 10_000_000


async def test_an_engine_that_counts_anew_makes_no_negative_rate(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    await sampled(telemetry, [1000, 1300, 0, 60], monkeypatch)
    samples = telemetry._tokens
    assert math.isclose(telemetry.status.tokens_per_second, 360 / (samples[-1][0] - samples[0][0]))


def test_memory_counts_this_process_and_what_it_started() -> None:
    alone = memory_in_use()
    assert alone > 10_000_000
    size = 200_000_000
    program = f"held = bytearray({size}); held[::4096] = b'x' * len(held[::4096]); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        together = memory_in_use()
        child.communicate("\n")
    assert size < together - alone < 2 * size
    assert memory_in_use() < together - size / 2


def test_pages_that_a_child_shares_count_once() -> None:
    shared = bytearray(os.urandom(1024)) * 150_000
    before = memory_in_use()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        assert memory_in_use() - before < len(shared) / 2
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_every_line_is_plain_json(telemetry: Telemetry, tmp_path: Path) -> None:
    telemetry.step(BATCH, TAUGHT, StepMetrics(4, loss=float("nan")), Tallies(()), "0-5", wait_s=0.0, waited={}, ends={})
    telemetry.end("failed")
    text = (tmp_path / "metrics" / "metrics.jsonl").read_text()
    kinds = [json.loads(line, parse_constant=lambda name: pytest.fail(name))["kind"] for line in text.splitlines()]
    assert kinds == ["start", "step", "end"]
