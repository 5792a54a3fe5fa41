"""Behaviour weights and the agreement of trainer and engine, over the lines of a run."""

import json
from dataclasses import asdict

import pytest

from rollart.dashboard.corrections import agreement, corrections
from rollart.dashboard.summary import summarize
from rollart.dashboard.summary_table import figures
from rollart.training.metrics import StalenessMetrics, StepMetrics


def _line(step: StepMetrics) -> dict:
    return json.loads(json.dumps({"kind": "step", "step": step.step + 1, "train": asdict(step)}))


STALE = StalenessMetrics(100, 0.1, 1.2, {"0.5": 1.0, "0.99": 3.0}, 0.8, {"clipped": 0.1, "truncated": 0.02})
STALER = StalenessMetrics(300, 0.1, 0.8, {"0.5": 1.0, "0.99": 2.0}, 0.4, {"clipped": 0.3, "truncated": 0.06})
FRESH = StalenessMetrics(50, 0.0, 1.0, {"0.99": 1.0}, 1.0, {"clipped": 0.0, "truncated": 0.0})
LINES = [
    {"kind": "start", "step": 0},
    _line(StepMetrics(0, by_staleness={1: STALE})),
    _line(StepMetrics(1, by_staleness={0: FRESH, 1: STALER}, drift=0.25, drift_max=2.0, drift_alarm=1, alarms=("they disagree",))),
    _line(StepMetrics(2, drift=0.75, drift_max=1.0)),
]


def test_weights_are_averaged_over_tokens_by_staleness() -> None:
    found = corrections(LINES)
    assert list(found) == [0, 1]
    assert (found[1].tokens, found[1].highest) == (400, 3.0)
    assert (found[1].weight, found[1].effective) == pytest.approx((0.9, 0.5))
    assert found[1].shares == pytest.approx({"clipped": 0.25, "truncated": 0.05})


def test_agreement_is_the_mean_over_steps_with_the_largest_difference_and_the_alarms() -> None:
    found = agreement(LINES)
    assert found is not None and (found.mean, found.highest, found.alarms) == (0.5, 2.0, 1)
    assert agreement(LINES[:2]) is None


def test_the_summary_says_both() -> None:
    summary = summarize(LINES, [])
    told = dict(figures(summary))
    assert told["behaviour weights, staleness 1"] == ("mean 0.900, 99 % of a step's under 3.00, effective samples 50%, clipped 25.0%, truncated 5.0%")
    assert told["trainer against engine"] == "0.5 nats apart on average, 2 at most, 1 steps alarmed"
    assert json.loads(json.dumps(summary.to_dict(), allow_nan=False))["corrections"]["1"]["tokens"] == 400
    assert summary.to_dict()["agreement"]["alarms"] == 1
    assert summarize(LINES[:1], []).to_dict()["agreement"] is None
