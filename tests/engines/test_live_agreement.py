"""Whether a step notices that an engine's log-probabilities are off, where all of its tokens are stale: a real engine, store and learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.engines.weight_cache import WeightCache
from rollart.training.metrics import StepMetrics
from rollart.training.settings import LearnerSettings
from rollart.training.worker import LearnerPlugin
from rollart.types import Attempt, Batch, Episode, Group, Member, Receipt, SamplingTransform, Score, Segment, Trajectory
from storage.version import Version
from storage.weights import WeightStore

FIRST = Version(0, 0)
LORA = {"rank": 2, "alpha": 8.0}
KINDS: dict[str, Any] = {"weights": None, "adapters": LORA, "merged adapters": {**LORA, "publish": "merged"}}


class Trainer:
    """A learner over a store, as a training worker has it, without the worker."""

    def __init__(self, folder: Path, place: Path, lora: Any = None, **agreement: Any) -> None:
        if lora is not None:
            pytest.importorskip("peft", reason="peft comes with the dev extra")
        fields = {"model": {"lora": lora}, "optimiser": {"lr": 0.02}, "agreement": agreement}
        self.trajectories: list[Trajectory] = []
        self.plugin = LearnerPlugin(
            str(folder), LearnerSettings.model_validate(fields), lambda receipts: [self.trajectories[r.row] for r in receipts],
            weights_url=str(place / "weights"), checkpoints_url=str(place / "checkpoints"),
        )  # fmt: skip
        self.plugin.setup(None)  # type: ignore[arg-type]  # it asks nothing of the worker
        _ = self.plugin.learner  # there before another is begun: transformers loads one model at a time in a process

    def publish(self, version: Version) -> WeightStore:
        metadata, files = self.plugin.described({})
        self.plugin.weights.publish(self.plugin.snapshot(version), version=version, metadata=metadata, files=files).result()
        return self.plugin.weights

    def train(self, step: int, trajectories: list[Trajectory]) -> StepMetrics:
        self.trajectories = trajectories
        members = []
        for row, t in enumerate(trajectories):
            receipt = Receipt(t.attempt, t.nonce, t.lineage, "file", row, t.outcome, 0, 0, 9, t.sampled, 1)
            members.append(Member(receipt, Score(t.attempt, t.nonce, float(row % 2))))
        return self.plugin.train(Batch(0, step, (Group(members[0].receipt.attempt.episode, tuple(members)),)), False)


@pytest.fixture(scope="module")
def policy(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny.model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(policy: Path, start_engine: Callable[..., str]) -> str:
    return start_engine("--model", str(policy), "--slots", "16", "--chunk", "64", "--max-length", "64")


@pytest.fixture
def sampled(engine: str, wire_to: Any, tiny: Any, tmp_path: Path) -> Callable[..., Any]:
    """Trajectories that the engine samples with the version that the store has, told to be of temperature 1 whatever it was."""

    async def sample(store: WeightStore, temperature: float, seed: int) -> list[Trajectory]:
        cache = WeightCache(WeightStore(store.url), tmp_path / "shm")
        found = []
        try:
            async with wire_to(engine) as wire:
                status, said = await wire.post("/update_weights_from_disk", {"model_path": str(cache.fetch(FIRST)), "weight_version": str(FIRST)})
                assert status == 200, said
                for member in range(6):
                    segment = Segment(SamplingTransform(temperature=1.0))
                    segment.append_prompt(tiny.prompt(5, seed=member))
                    reply = await wire.generate(segment.ids, 12, temperature=temperature, sampling_seed=seed + member)
                    logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
                    segment.append_response(reply["output_ids"], logprobs, [FIRST.step] * 12, "length")
                    found.append(Trajectory(Attempt(Episode("t", seed), member), f"n{member}", 0, 0, [segment], "terminated"))
        finally:
            cache.close()
        return found

    return sample


@pytest.fixture
def trainers(policy: Path, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(lora: Any = None, **agreement: Any) -> Trainer:
        made.append(Trainer(policy, tmp_path / f"trainer{len(made)}", lora, **agreement))
        return made[-1]

    yield make
    for trainer in made:
        trainer.plugin.teardown(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1.0, 1.1])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_on_stale_tokens_alone_alarms_if_the_engine_was_off_and_not_if_it_was_right(
    trainers: Callable[..., Trainer], sampled: Callable[..., Any], kind: str, temperature: float
) -> None:
    trainer = trainers(KINDS[kind])
    store = trainer.publish(FIRST)
    first = trainer.train(0, await sampled(store, 1.0, 100))
    assert first.rescored is None and first.drift is not None and first.drift < 1e-4 and first.drift_tokens == 72
    metrics = trainer.train(1, await sampled(store, temperature, 200))
    assert set(metrics.by_staleness) == {1}
    assert metrics.by_staleness[1].drift > 0.02  # what the trainer itself says of these tokens tells nothing of the engine
    assert (metrics.rescored, metrics.drift_tokens) == ("0-0", 4 * 12)
    assert metrics.drift is not None and metrics.drift_max is not None and metrics.drift <= metrics.drift_max
    if temperature == 1.0:
        assert metrics.drift_max < 1e-4 and metrics.alarms == ()
    else:
        (alarm,) = metrics.alarms
        assert metrics.drift > 1e-2 and metrics.drift_alarm == 1 and "temperature" in alarm


@pytest.mark.parametrize("kind", KINDS)
async def test_rescoring_leaves_no_trace_in_what_is_trained(trainers: Callable[..., Trainer], sampled: Callable[..., Any], kind: str) -> None:
    looking, blind = trainers(KINDS[kind], every=1), trainers(KINDS[kind], sample=0)
    store = looking.publish(FIRST)
    batches = [await sampled(store, 1.0, seed) for seed in (100, 200, 300)]
    for step, batch in enumerate(batches):
        seen, unseen = looking.train(step, batch), blind.train(step, batch)
        assert (seen.loss, seen.grad_norm) == (unseen.loss, unseen.grad_norm)
        assert (seen.rescored, unseen.rescored) == ("0-0" if step else None, None)
        assert unseen.drift is None or not step
    ours, theirs = (t.plugin.learner.state()[0] for t in (looking, blind))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())


async def test_enough_tokens_of_the_trainers_own_version_or_another_step_need_no_sample(
    trainers: Callable[..., Trainer], sampled: Callable[..., Any]
) -> None:
    trainer = trainers(own=12, every=2)
    store = trainer.publish(FIRST)
    stale = await sampled(store, 1.0, 100)
    assert trainer.train(0, stale).rescored is None
    fresh = Segment(SamplingTransform())
    fresh.append_prompt([1, 2])
    fresh.append_response([3] * 12, [-2.0] * 12, [1] * 12, "length")
    mixed = [*stale[1:], Trajectory(Attempt(Episode("t", 100), 0), "n", 0, 0, [fresh], "terminated")]
    metrics = trainer.train(1, mixed)
    assert metrics.rescored is None and metrics.drift_tokens == 12
    assert trainer.train(2, stale).rescored is None
    assert trainer.train(3, stale).rescored == "0-0"


async def test_a_version_that_is_not_stored_any_more_is_told_and_training_goes_on(
    trainers: Callable[..., Trainer], sampled: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainers()
    stale = await sampled(trainer.publish(FIRST), 1.1, 100)
    trainer.train(0, stale)
    trainer.plugin.weights.objects.delete("commits/0-00000000.json")
    metrics = trainer.train(1, stale)
    assert metrics.optimiser_steps == 1 and metrics.rescored is None and metrics.drift is None
    assert "no version of step 0 is stored any more" in caplog.text
