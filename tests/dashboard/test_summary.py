"""A run's summary, recomputed from its lines and rows."""

import io
import json

import pytest
from rich.console import Console

from rollart.dashboard.metrics import MetricsWriter
from rollart.dashboard.summary import stretches, summarize, summarize_run
from rollart.dashboard.summary_table import summary_table


def evaluations(made_up, task: str, scores: dict[int, list[float]], **changes: object) -> list[dict]:
    return [made_up.row("evaluate", task, e, version, score, **changes) for version, values in scores.items() for e, score in enumerate(values)]


def test_reward_before_after_best_and_rise(made_up):
    table = evaluations(made_up, "frozenlake", {0: [0, 0, 1, 0], 10: [1, 1, 1, 1], 20: [1, 1, 1, 0]})
    (task,) = summarize([], table).tasks
    assert (task.before.version, task.before.estimate.mean) == (0, 0.25)
    assert (task.best.version, task.best.estimate.mean) == (10, 1.0)
    assert (task.after.version, task.after.estimate.mean) == (20, 0.75)
    assert (task.rise.mean, task.rise.method, task.rise.n) == (0.5, "paired", 4)
    assert task.final_over_best == 0.75


def test_an_episode_with_a_token_of_another_version_is_void(made_up):
    table = [*evaluations(made_up, "frozenlake", {0: [0, 0, 0]}), made_up.row("evaluate", "frozenlake", 9, 0, 1.0, last_version=1)]
    (task,) = summarize([], table).tasks
    assert (task.before.estimate.mean, task.before.estimate.n) == (0.0, 3)


def test_rows_of_an_abandoned_lineage_and_without_a_score_are_left_out(made_up):
    table = [
        *evaluations(made_up, "a", {0: [0.5, 0.5]}),
        *evaluations(made_up, "a", {0: [1.0] * 5}, fate="lineage"),
        made_up.row("evaluate", "a", 7, 0, float("nan")),
        made_up.row("evaluate", "a", 8, 0, 1.0) | {"version": float("nan"), "fate": None},
    ]
    (task,) = summarize([], table).tasks
    assert (task.before.estimate.mean, task.before.estimate.n) == (0.5, 2)


def test_members_of_one_episode_count_as_one(made_up):
    table = [made_up.row("evaluate", "a", 0, 0, score, member=member) for member, score in enumerate([0.0, 1.0])] + [
        made_up.row("evaluate", "a", 1, 0, 1.0)
    ]
    (task,) = summarize([], table).tasks
    assert (task.before.estimate.mean, task.before.estimate.n) == (0.75, 2)


def test_versions_may_be_spelled_with_their_lineage(made_up):
    (task,) = summarize([], [made_up.row("evaluate", "a", 0, 5, 1.0) | {"version": "0-5"}]).tasks
    assert task.before.version == 5


def test_fates_count_training_only_and_staleness_what_was_trained_on(made_up):
    table = [
        made_up.row("train", "a", 0, 3, 1.0),
        made_up.row("train", "a", 1, 3, 1.0, staleness=1),
        made_up.row("train", "a", 2, 3, 1.0, staleness=1),
        made_up.row("train", "a", 3, 3, 0.0, fate="too_stale", staleness=2),
        made_up.row("train", "a", 4, 3, None, fate="failed", staleness=float("nan")),
        made_up.row("evaluate", "a", 0, 3, 1.0),
    ]
    summary = summarize([], table)
    assert summary.fates == {"trained": 3, "too_stale": 1, "failed": 1}
    assert summary.staleness == {0: 1, 1: 2}


def test_time_by_stage_of_the_made_up_run(made_up):
    summary = summarize(made_up.lines(steps=60), made_up.rows(steps=60))
    assert summary.steps == 60
    assert summary.usage.stages["train"] == pytest.approx(120)
    assert summary.usage.stages["rollout"] == pytest.approx(240)
    assert summary.usage.overlap_share == pytest.approx(1.0)
    assert summary.usage.rate_ratio == pytest.approx(0.7, abs=0.03)
    assert summary.peak_memory == 2_345_000_000


def test_time_in_which_the_run_was_stopped_is_no_idle_time(made_up):
    one = made_up.lines(steps=20)
    later = [line | {"kind": "resume"} if line["kind"] == "start" else line for line in made_up.lines(steps=20)]
    for line in later:
        line["intervals"] = [[s, a + 5000, b + 5000] for s, a, b in line.get("intervals", [])]
        line["samples"] = [[t + 5000, n] for t, n in line.get("samples", [])]
    both, alone = summarize([*one, *later], []), summarize(one, [])
    assert len(stretches([*one, *later])) == 2
    assert both.usage.trainer_idle_share == pytest.approx(alone.usage.trainer_idle_share)
    assert both.usage.window == pytest.approx(2 * alone.usage.window)


def test_an_empty_run_has_a_summary_too():
    summary = summarize([], [])
    assert json.loads(json.dumps(summary.to_dict()))["reward"] == {}
    Console(file=io.StringIO()).print(summary_table(summary))


def test_the_dict_is_json_and_the_table_fits_eighty_columns(made_up, tmp_path):
    url = str(tmp_path)
    with MetricsWriter(url) as writer:
        for line in made_up.lines()[1:]:
            writer.write(line)
    summary = summarize_run(url, None, made_up.rows())
    assert json.loads(json.dumps(summary.to_dict(), allow_nan=False))["reward"]["frozenlake"]["after"]["n"] == 200
    console = Console(file=io.StringIO(), width=80)
    console.print(summary_table(summary))
    text = console.file.getvalue()
    for part in (*made_up.TASKS, "n = 200", "paired", "final/best", "trainer idle", "ratio 0.", "2.35 GB", "warm_up", "too_stale"):
        assert part in text
    assert "…" not in text


def test_a_data_frame_gives_the_same_as_its_rows(made_up):
    pandas = pytest.importorskip("pandas")
    table = made_up.rows(steps=20, episodes=20)
    assert summarize([], pandas.DataFrame(table, columns=list(made_up.COLUMNS))).to_dict() == summarize([], table).to_dict()
