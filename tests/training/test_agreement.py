"""When a step alarms that trainer and engine disagree, and what it says."""

import logging
import math
from pathlib import Path

import pytest
import torch

from rollart.training.agreement import alarms
from rollart.training.batch import build_batch
from rollart.training.learner import Learner
from rollart.training.settings import AgreementSettings, LearnerSettings, ModelSettings
from rollart.types import Attempt, Episode, SamplingTransform, Segment, Trajectory

FP32, BF16 = ModelSettings(), ModelSettings(dtype="bfloat16")


@pytest.mark.parametrize(
    ("drift", "highest", "model", "named"),
    [
        (None, None, FP32, []), (1e-5, 1e-3, FP32, []), (2e-3, 0.01, FP32, ["agreement.mean"]), (1e-4, 0.2, FP32, ["agreement.highest"]),
        (0.05, 1.0, BF16, []), (0.1, 2.0, BF16, ["agreement.mean", "agreement.highest"]), (math.nan, math.inf, FP32, ["mean", "highest"]),
    ],
)  # fmt: skip
def test_a_difference_over_a_bound_alarms_and_names_the_bound(drift: float, highest: float, model: ModelSettings, named: list[str]) -> None:
    found = alarms(drift, highest, AgreementSettings(), model)
    assert len(found) == bool(named)
    for alarm in found:
        assert all(name in alarm for name in named)
        assert all(cause in alarm for cause in ("temperature", "transform", "weights", "precision", "KV"))


def test_bounds_may_be_set() -> None:
    assert alarms(2e-3, 0.2, AgreementSettings(mean=0.01, highest=0.5), FP32) == ()


@pytest.mark.parametrize(("sampled_at", "wrong"), [(1.0, False), (0.7, True)])
def test_a_step_on_samples_of_another_temperature_alarms(llama: Path, caplog: pytest.LogCaptureFixture, sampled_at: float, wrong: bool) -> None:
    learner = Learner(llama, LearnerSettings())
    segment = Segment(SamplingTransform(temperature=1.0))
    segment.append_prompt([1, 2])
    with torch.no_grad():
        for token in (3, 5, 7):
            logits = learner.policy.model(input_ids=torch.tensor([segment.ids])).logits[0, -1]
            segment.append_response([token], [float(torch.log_softmax(logits / sampled_at, -1)[token])], [0], "stop")
    trajectory = Trajectory(Attempt(Episode("t", 0), 0), "n", 0, 0, [segment], "terminated")
    with caplog.at_level(logging.WARNING):
        metrics = learner.train_step(build_batch([trajectory], {trajectory.attempt: 1.0}, 0))
    assert metrics.drift is not None and metrics.drift_max is not None and metrics.drift_max >= metrics.drift
    assert (metrics.drift < 1e-4) is not wrong
    assert metrics.drift_alarm == len(metrics.alarms) == wrong
    assert ("disagree" in caplog.text) is wrong
