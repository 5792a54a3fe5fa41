"""An unmodified agent on the OpenAI SDK trains: on a real cluster, with the quick start's kind of policy, from nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

STEPS = 10
CONFIG = """
run: {dashboard_port: 0, seed: 3}
hardware:
  trainer: {resource: TRAIN, slots: 1}
  engine: {resource: GENERATE, slots: 1}
  player: {resource: ENVIRONMENT, slots: 24}
stages: {train: trainer, generate: engine, environment: player}
policy:
  tiny: {vocab: 300, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 32, max_length: 160}
tasks:
  - name: letters
    environment: "tests.integration.letters:Letters"
    group_size: 6
    max_turns: 3
    max_new_tokens: 4
    max_tokens: 160
    agent: {run_timeout: 200}
train: {steps: 10, groups: 6, alpha: 1, checkpoint_every: 100}
training:
  optimiser: {lr: 1.0e-2, decay: constant}
  loss: {name: decoupled_ppo, clip_low: 0.2, clip_high: 0.2, truncate: 2.0}
  batch: {denominator: trajectory}
engine: {slots: 32, max_length: 160}
rollout: {flush: 0.05}
evaluate: {episodes: 24, every: 0}
"""

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def ended(place: Any) -> SimpleNamespace:
    place.config.write_text(CONFIG)
    running = place.finish("agent", f"train.steps={STEPS}")
    return SimpleNamespace(running=running, table=place.trajectories("agent"), place=place)


def test_the_reward_rises_and_engine_and_trainer_agree_on_every_segment(ended: SimpleNamespace) -> None:
    table, place = ended.table, ended.place
    scores = table[table["purpose"] == "evaluate"].groupby("version")["score"].mean()
    assert scores[STEPS] > scores[0] + 0.1, scores
    steps = place.metrics("agent", "step")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    drifts = [line["train"]["drift"] for line in steps if line["train"]["drift"] is not None]
    assert drifts and max(drifts) < 1e-4 and sum(line["train"]["drift_alarm"] for line in steps) == 0
    assert [line["state"] for line in place.metrics("agent", "end")] == ["done"] and ended.running.left() == []


def test_each_trajectory_holds_the_conversation_in_one_segment_and_the_helper_s_in_another(ended: SimpleNamespace) -> None:
    rows = ended.table[ended.table["fate"] == "trained"]
    assert len(rows) >= STEPS * 18
    for row in rows.itertuples():
        assert [len(s["turns"]) for s in row.segments] == [2, 1] and row.outcome == "terminated"
        assert row.sampled == sum(sum(s["mask"]) for s in row.segments)
    assert '"ignored_parameters": {"temperature": 1}' in rows.iloc[0]["info"]
