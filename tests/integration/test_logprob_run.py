"""A run whose reference and proximal log-probabilities are computed by workers of a class of their own: as without, but elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

STEPS = 6
LOSS = (
    "training.loss.kl=0.2", "training.batch.minibatches=2", "run.deterministic=true", "train.alpha=0", "train.checkpoint_every=3",
    "evaluate.every=0", "evaluate.episodes=6",
)  # fmt: skip
ELSEWHERE = ("hardware.scorer={resource: LOGPROBS, workers: 2}", "stages.logprobs=scorer")
FORGETFUL = ("weights.keep_last=1", "weights.keep_checkpoints=1", "weights.grace=0")
"""Keeps of all versions the newest alone, and with it what something asks for."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(place: Any) -> SimpleNamespace:
    """One run through, one that was resumed halfway, and one whose trainer makes the passes itself."""
    whole = place.finish("whole", *LOSS, *ELSEWHERE, *FORGETFUL, f"train.steps={STEPS}")
    place.finish("parted", *LOSS, *ELSEWHERE, *FORGETFUL, f"train.steps={STEPS // 2}")
    place.finish("parted", *LOSS, *ELSEWHERE, *FORGETFUL, f"train.steps={STEPS}", resume=True)
    place.finish("here", *LOSS, f"train.steps={STEPS}")
    return SimpleNamespace(whole=whole, place=place)


def bits(place: Any, name: str) -> dict[str, bytes]:
    """The weights after the last step."""
    store = place.weights(name)
    newest = store.newest()
    assert newest.step == STEPS
    return {n: t.numpy().tobytes() for n, t in store.pull(newest).items()}


def steps(place: Any, name: str) -> list[dict[str, Any]]:
    return [line["train"] for line in place.metrics(name, "step")]


def test_the_stage_says_what_the_trainer_says_itself(runs: SimpleNamespace) -> None:
    elsewhere, here = steps(runs.place, "whole"), steps(runs.place, "here")
    taken = [i for i, s in enumerate(elsewhere) if s["optimiser_steps"]]
    assert len(taken) >= 2  # else there was nothing to compare
    assert {elsewhere[i]["optimiser_steps"] for i in taken} == {2} and elsewhere[taken[-1]]["kl"] > 1e-5
    for name in ("loss", "kl", "entropy"):  # of the first that changed anything, since rounding may lead to other samples after it
        assert elsewhere[taken[0]][name] == pytest.approx(here[taken[0]][name], rel=1e-3, abs=1e-6)


def test_the_stage_has_its_time_in_the_metrics_and_the_summary(runs: SimpleNamespace) -> None:
    spans = [i for line in runs.place.metrics("whole", "intervals") for i in line["intervals"] if i[0] == "logprobs"]
    assert len(spans) == STEPS and all(end > start for _, start, end in spans)
    assert "logprobs" in runs.whole.printed


def test_no_checkpoint_holds_a_reference_and_its_version_stays_though_all_others_go(runs: SimpleNamespace) -> None:
    saved = runs.place.checkpoints("whole").load()
    assert not any(name.startswith("reference/") for name in saved.arrays)
    assert saved.documents["reference"] == "0-0"
    assert any(name.startswith("reference/") for name in runs.place.checkpoints("here").load().arrays)
    assert [str(v) for v in runs.place.weights("whole").versions()] == ["0-0", f"0-{STEPS}"]


def test_a_resumed_run_goes_on_with_the_same_reference_bit_for_bit(runs: SimpleNamespace) -> None:
    assert runs.place.checkpoints("parted").load().documents["reference"] == "0-0"
    assert bits(runs.place, "parted") == bits(runs.place, "whole")
    assert [s["kl"] for s in steps(runs.place, "parted")] == [s["kl"] for s in steps(runs.place, "whole")]


def test_a_worker_of_the_stage_that_dies_costs_a_share_and_not_the_run(runs: SimpleNamespace) -> None:
    running = runs.place.start("killed", *LOSS, *ELSEWHERE, f"train.steps={STEPS}", "weights.keep_last=0")
    running.says("training step 2/")
    running.worker("scorer-1").kill()
    assert running.wait() == 0, running.heard
    assert running.left() == []
    assert [line["step"] for line in runs.place.metrics("killed", "step")] == list(range(1, STEPS + 1))
