"""One small run from its start to its report, and what it leaves, checked against its own trajectories."""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

STEPS = 5
ALPHA = 1
QUOTAS = {"guess_number": (4, 4), "chain_sum": (2, 3)}
"""Groups a batch and members a group, as the configuration's weights give them."""

IDENTITY = ["purpose", "task", "episode", "member"]


@pytest.fixture(scope="module")
def ended(place: Any) -> SimpleNamespace:
    """The run, finished, with what of its processes and folders was left when it ended."""
    running = place.start("whole", f"train.steps={STEPS}", f"train.alpha={ALPHA}")
    running.says("training step 1/")
    at_work, cached = len(running.alive()), running.shared_memory.exists()
    code = running.wait()
    return SimpleNamespace(
        running=running, code=code, at_work=at_work, cached=cached, left=running.left(), table=place.trajectories("whole"), place=place
    )  # fmt: skip


@pytest.fixture
def trained(ended: SimpleNamespace) -> pd.DataFrame:
    """The trajectories that a training step consumed."""
    return ended.table[ended.table["fate"].isin(["trained", "no_signal"])]


def test_a_run_ends_well_and_leaves_no_process_and_no_folder_outside_its_own(ended: SimpleNamespace) -> None:
    assert ended.code == 0, ended.running.heard
    assert ended.at_work >= 6  # itself, four workers, the engine
    assert ended.cached
    assert ended.left == []
    assert not ended.running.shared_memory.exists()
    assert [p.name for p in ended.running.temporary.iterdir() if p.name.startswith("rollart")] == []


def test_a_run_leaves_everything_that_is_promised(ended: SimpleNamespace) -> None:
    folder = ended.place.run("whole")
    assert (folder / "config.yaml").read_text().startswith("run:")
    assert [str(v) for v in ended.place.weights("whole").versions()] == [f"0-{n}" for n in range(STEPS + 1)]
    assert [str(v) for v in ended.place.checkpoints("whole").versions()] == ["0-2", "0-4", "0-5"]  # weights.keep_checkpoints
    assert sorted(p.name for p in (folder / "ledger").iterdir()) == [f"{n:08d}.json" for n in range(1 + STEPS)]
    assert [line["step"] for line in ended.place.metrics("whole", "step")] == list(range(1, STEPS + 1))
    assert [line["step"] for line in ended.place.metrics("whole", "evaluation")] == [0, 3, STEPS]
    assert [line["state"] for line in ended.place.metrics("whole", "end")] == ["done"]
    assert len(list((folder / "metrics").glob("events.out.tfevents.*"))) == 1
    assert "<html" in (folder / "report.html").read_text()


def test_each_version_can_be_read_back_whole_and_training_changed_it(ended: SimpleNamespace) -> None:
    store = ended.place.weights("whole")
    pulled = [store.pull(v) for v in store.versions()]
    learned = {line["step"] for line in ended.place.metrics("whole", "step") if line["train"]["optimiser_steps"]}
    assert learned  # otherwise nothing below says anything
    for step in range(1, STEPS + 1):
        same = all(bool((pulled[step - 1][name] == value).all()) for name, value in pulled[step].items())
        assert same == (step not in learned)


def test_each_number_of_the_printed_reward_table_follows_from_the_trajectories(ended: SimpleNamespace) -> None:
    rows = ended.table[ended.table["purpose"] == "evaluate"]
    for task in QUOTAS:
        means = rows[rows["task"] == task].groupby("version")["score"].mean()
        before, after, best = means[0], means[STEPS], means.max()
        line, _ = (line for line in ended.running.printed.splitlines() if line.strip().startswith(task))  # the other is what became of its members
        found = re.findall(r"[+-]?\d+\.\d+|\d+$", line.rstrip())
        assert found == [f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", f"{best:.3f}", str(int(means.idxmax()))]
        assert rows[(rows["task"] == task) & (rows["version"] == STEPS)]["episode"].nunique() == 12
    fates = ended.table[ended.table["purpose"] == "train"]["fate"].value_counts()
    for fate, count in fates.items():
        assert re.search(rf"trajectories by fate .*\b{fate} {count}\b", ended.running.printed)


def test_evaluation_holds_one_version_to_its_end(ended: SimpleNamespace) -> None:
    rows = ended.table[ended.table["purpose"] == "evaluate"]
    assert len(rows) == 2 * (12 + 6 + 12)
    for row in rows.itertuples():
        assert set(_sampled_versions(row)) == {row.version}


def test_nothing_is_trained_twice(ended: SimpleNamespace, trained: pd.DataFrame) -> None:
    assert not trained.duplicated(IDENTITY).any()
    assert not ended.table["nonce"].duplicated().any()
    settled = [nonce for entry in ended.place.journal("whole").batches() for _, nonce, fate in entry.fates if fate in ("trained", "no_signal")]
    assert sorted(settled) == sorted(trained["nonce"])


def test_each_batch_holds_its_tasks_quotas_in_whole_groups(trained: pd.DataFrame) -> None:
    assert sorted(trained["version"].unique()) == list(range(STEPS))
    for _, batch in trained.groupby("version"):
        for task, (groups, members) in QUOTAS.items():
            sizes = batch[batch["task"] == task].groupby("episode")["member"].nunique()
            assert list(sizes) == [members] * groups


def test_nothing_trained_on_is_older_than_the_window_or_younger_than_its_step(ended: SimpleNamespace, trained: pd.DataFrame) -> None:
    existing = {v.step for v in ended.place.weights("whole").versions()}
    ages = set()
    for row in trained.itertuples():
        versions = _sampled_versions(row)
        assert set(versions) <= existing
        assert 0 <= row.version - versions[0] <= ALPHA
        assert versions == sorted(versions)
        assert row.staleness == row.version - versions[0]
        ages.add(row.staleness)
    assert ages == {0, 1}  # the run was asynchronous: rollout went on while the trainer worked


def test_dask_reads_the_trajectories_as_one_dataframe(ended: SimpleNamespace) -> None:
    import dask.dataframe as dd

    frame = dd.read_parquet(f"{ended.place.run('whole')}/trajectories/*.parquet", columns=["purpose", "task", "score"])
    counts = frame[frame["purpose"] == "evaluate"].groupby("task")["score"].count().compute()
    assert counts.to_dict() == {"chain_sum": 30, "guess_number": 30}


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(ended: SimpleNamespace) -> None:
    place = ended.place
    shutil.copytree(place.run("whole"), place.run("longer"))
    place.finish("longer", f"train.steps={STEPS + 2}", resume=True)
    assert [line["step"] for line in place.metrics("longer", "step")] == list(range(1, STEPS + 3))
    table = place.trajectories("longer")
    trained = table[table["fate"].isin(["trained", "no_signal"])]
    assert not trained.duplicated(IDENTITY).any()
    assert sorted(trained["version"].unique()) == list(range(STEPS + 2))
    assert not table["nonce"].duplicated().any()


def test_tokens_scores_and_seeds_of_a_group_belong_together(ended: SimpleNamespace, trained: pd.DataFrame) -> None:
    for (_, _), group in trained.groupby(["task", "episode"]):
        assert group["seed"].nunique() == 1
        prompts = {tuple(row.segments[0]["ids"][: row.segments[0]["turns"][0]["start"]]) for row in group.itertuples()}
        assert len(prompts) == 1
    for row in ended.table.itertuples():
        for segment in row.segments:
            assert len(segment["ids"]) == len(segment["mask"]) == len(segment["logprobs"]) == len(segment["versions"])
            assert sum(segment["mask"]) == row.sampled


def _sampled_versions(row: Any) -> list[int]:
    return [int(v) for segment in row.segments for v, mask in zip(segment["versions"], segment["mask"], strict=True) if mask]
