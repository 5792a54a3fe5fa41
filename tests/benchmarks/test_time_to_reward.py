"""The arithmetic of time to reward on curves that are known, and what both sides are told; the runs themselves are `make bench`'s."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.outcome import Outcome
from benchmarks.reward.sides import configuration, rollart_curve, trl_command, trl_curve
from benchmarks.reward.task import Plan, questions
from benchmarks.reward.watched import watched
from benchmarks.time_to_reward import STEPS, TARGET, WINDOW, draw, headline, row_of, running
from rollart.config import Config
from rollart.control.seeds import environment_seed
from rollart.dashboard.metrics import MetricsWriter
from rollart.environments.reasoning import Reasoning
from rollart.types import Episode

PLAN = Plan("/a/policy", seed=3, steps=4, groups=WINDOW // 2 // 8)
"""Two of its steps fill the window."""


def test_a_running_mean_begins_where_its_window_is_full():
    assert running([1.0, 0.0, 0.5, 1.5], 2) == [None, 0.5, 0.25, 1.0]


def test_the_reward_is_reached_at_the_end_of_the_step_that_fills_the_window_with_it():
    row = row_of("TRL", PLAN, [[1.0, 1.0], [2.0, TARGET - 0.5], [3.0, TARGET + 0.5], [5.0, 0.9]])
    assert (row["seconds_to_reward"], row["steps_to_reward"], row["reached"]) == (3.0, 3.0, 1.0)
    assert row["seconds_a_step"] == 1.25
    assert row["curve"][0] == [1.0, 1.0, None]


def test_a_run_that_falls_short_counts_with_all_its_seconds_and_says_so():
    row = row_of("TRL", PLAN, [[1.0, 0.2], [2.5, 0.3]])
    assert (row["seconds_to_reward"], row["steps_to_reward"], row["reached"], row["last_reward"]) == (2.5, 2.0, 0.0, 0.25)


def test_the_headline_divides_our_median_by_theirs(tmp_path: Path):
    rows = [row_of("rollart", PLAN, [[float(s), TARGET], [2.0 * s, TARGET]]) for s in (1, 3, 20)]
    rows += [row_of("TRL", PLAN, [[float(s), TARGET], [2.0 * s, TARGET]]) for s in (4, 6, 7)]
    assert headline(rows) == {"time_ratio": 0.5, "steps_ratio": 1.0, "step_time_ratio": 0.5, "reached_share": 1.0}
    draw(Outcome(rows, {})).savefig(tmp_path / "curves.png")


def test_a_runs_curve_counts_from_the_wait_for_its_first_batch(tmp_path: Path):
    with MetricsWriter(str(tmp_path / PLAN.name)) as metrics:
        metrics.write({"kind": "intervals", "intervals": [["warm_up", 10.0, 90.0], ["train", 103.0, 104.0]]})
        metrics.write({"kind": "step", "step": 1, "time": 104.5, "seconds": {"wait": 3.0, "train": 1.0}, "reward": {"chain_sum": 0.25}})
        metrics.write({"kind": "intervals", "intervals": [["train", 106.0, 107.0]]})
        metrics.write({"kind": "step", "step": 2, "time": 107.5, "seconds": {"wait": 1.5, "train": 1.0}, "reward": {"chain_sum": 0.5}})
    assert rollart_curve(PLAN, tmp_path) == [[4.5, 0.25], [7.5, 0.5]]


def test_trls_curve_is_what_its_process_told(tmp_path: Path):
    Path(trl_command(PLAN, tmp_path)[-1]).write_text("[1.5, 0.25]\n[2.0, 0.5]\n")
    assert trl_curve(PLAN, tmp_path) == [[1.5, 0.25], [2.0, 0.5]]
    assert Plan(**json.loads(trl_command(PLAN, tmp_path)[-2])).folder == PLAN.folder


def test_our_configuration_is_a_valid_one_with_the_plans_numbers(tmp_path: Path):
    config = Config.model_validate(configuration(PLAN, tmp_path))
    assert [(t.name, t.group_size, config.train.groups) for t in config.tasks] == [("chain_sum", 8, PLAN.groups)]
    assert (config.training.optimiser.lr, config.training.optimiser.decay, config.training.batch.minibatches) == (PLAN.lr, "constant", 1)
    assert config.train.checkpoint_every > PLAN.steps and config.evaluate.every == 0 and config.warm_up.steps == 0


def test_both_sides_are_asked_the_same_questions_in_the_same_order():
    settings, asked = questions(PLAN)
    assert len(asked) == PLAN.groups * PLAN.steps and PLAN.steps < STEPS
    environment = Reasoning(settings)
    assert [shown for shown, _ in asked[:3]] == [environment.reset(environment_seed(3, Episode("chain_sum", i, "train"))) for i in range(3)]
    assert asked[0][1]["question"].endswith(asked[0][0])


def test_a_peak_counts_what_the_commands_children_hold():
    size = 150_000_000
    child = f"import time; kept = b'x' * {size}; time.sleep(2)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert size < watched([sys.executable, "-c", parent]) < 2 * size


def test_a_command_that_fails_while_watched_is_an_error():
    with pytest.raises(subprocess.CalledProcessError):
        watched([sys.executable, "-c", "raise SystemExit(3)"])
