"""What a run published is all that others need: an evaluation and a training start from URL@VERSION, whatever became of the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollart.config import ConfigError, load
from rollart.preparation import check_inputs
from storage.version import Version
from storage.weights import WeightStore

EVALUATION = ("evaluate.episodes=4", "evaluate.every=0")


@pytest.fixture(scope="module")
def source(place: Any) -> SimpleNamespace:
    """A short run's weights, alone: everything else of the run is gone."""
    place.finish("source", "train.steps=2", "warm_up.steps=0", *EVALUATION)
    weights = place.folder / "kept" / "weights"
    shutil.move(place.run("source") / "weights", weights)
    files = {p.name: p.read_bytes() for p in (place.run("source") / "policy").iterdir()}
    shutil.rmtree(place.run("source"))
    return SimpleNamespace(url=str(weights), store=WeightStore(str(weights)), files=files)


@pytest.mark.slow
def test_each_version_carries_its_models_config_and_tokenizer(source: SimpleNamespace) -> None:
    assert {"config.json", "tokenizer.json"} <= source.files.keys()
    for version in source.store.versions():
        commit = source.store.commit(version)
        assert {name: source.store.file(version, name) for name in commit.files} == source.files
    assert len([p for p in source.store.objects.list() if p.startswith("files/")]) == len(source.files)


@pytest.mark.slow
def test_an_evaluation_measures_that_version_and_trains_nothing(place: Any, source: SimpleNamespace) -> None:
    place.finish("measured", f"policy={{model: '{source.url}@0-2'}}", *EVALUATION, flow="evaluate")
    made = place.weights("measured")
    assert [str(v) for v in made.versions()] == ["0-0"]
    one, other = made.pull(), source.store.pull(Version(0, 2))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    (line,) = place.metrics("measured", "evaluation")
    assert line["step"] == 0
    table = place.trajectories("measured")
    assert set(table["purpose"]) == {"evaluate"} and len(table) == 8
    assert (place.run("measured") / "report.html").is_file() and place.metrics("measured", "step") == []


@pytest.mark.slow
def test_a_training_starts_from_a_tagged_version_and_goes_on_after_it_is_gone(place: Any, source: SimpleNamespace) -> None:
    source.store.tag("best", Version(0, 1))
    settings = (f"policy={{model: '{source.url}@best'}}", "warm_up.steps=0", "train.checkpoint_every=1", *EVALUATION)
    place.finish("onwards", "train.steps=1", *settings)
    first, start = place.weights("onwards").pull(Version(0, 0)), source.store.pull(Version(0, 1))
    assert all(torch.equal(first[name], start[name]) for name in start)
    source.store.untag("best")
    place.finish("onwards", "train.steps=2", *settings, resume=True)
    assert [line["step"] for line in place.metrics("onwards", "step")] == [1, 2]


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("@0-9", "doesn't hold version 0-9"),
        ("@worst", "has no tag 'worst'"),
        ("", "say which one is meant, such as"),
        ("@a b", "can't be a tag"),
        ("/none", "can't be listed as a folder"),
    ],
)
def test_a_model_that_is_not_there_is_one_line_of_the_check(place: Any, tmp_path: Path, ref: str, says: str) -> None:
    store = WeightStore(str(tmp_path))
    store.publish({"w": torch.ones(2)}, version=Version(0, 0)).result()
    with pytest.raises(ConfigError) as refused:
        check_inputs(load(place.config, [f"policy={{model: '{store.url}{ref}'}}"]))
    (line,) = str(refused.value).splitlines()
    assert line.startswith("policy.model: ") and says in line


def test_a_version_without_a_config_is_refused_before_anything_starts_with_what_it_lacks(place: Any) -> None:
    bare = WeightStore(str(place.folder / "bare"))
    bare.publish({"w": torch.ones(2)}, version=Version(0, 0), files={"tokenizer.json": b"{}"}).result()
    running = place.start("refused", f"policy={{model: '{bare.url}@newest'}}", *EVALUATION, flow="evaluate")
    assert running.wait() == 2
    (line,) = running.heard.strip().splitlines()
    assert line.startswith(f"rollart: policy.model: {bare.url}@newest has no config.json; ")
    assert not place.run("refused").exists()
