"""The flow draft on a run's folder whose trajectories a real small policy sampled: what it learns, what it leaves, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from rollart.cli import main
from rollart.drafts.folder import read_config
from rollart.policy import build_policy, init_model, load_config
from rollart.rollout.records import encode
from rollart.run import RunFolder
from rollart.training.draft_texts import split_texts
from rollart.types import Attempt, Episode, Purpose, SamplingTransform, Segment, Trajectory
from storage.models.folders import model_files
from storage.weights import WeightStore

CONFIG = """
run: {dashboard_port: 0, seed: 3}
hardware: {one: {resource: ONE, slots: 8}}
stages: {train: one, generate: one, environment: one}
policy: {tiny: {vocab: 300, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 32, max_length: 64}}
tasks: [{name: guess_number, environment: guess_number, max_tokens: 64}]
engine: {max_length: 64}
training: {draft: {steps: 2, optimiser: {lr: 5.0e-3}}}
draft_training: {steps: 60, batch: 16, held_out: 0.2}
"""

EPISODES, LENGTH, PROMPT = 40, 16, 4


def sampled(model: Any, purpose: Purpose = "train", temperature: float = 1.0) -> list[Trajectory]:
    """Two trajectories an episode, from `model` itself."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 40, (2 * EPISODES, PROMPT), generator=generator)
    logprobs = []
    with torch.no_grad():
        for _ in range(LENGTH):
            log_p = model(ids).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
            logprobs.append(log_p.gather(1, drawn))
            ids = torch.cat([ids, drawn], 1)
    made = []
    for row, (text, found) in enumerate(zip(ids.tolist(), torch.cat(logprobs, 1).tolist(), strict=True)):
        segment = Segment(SamplingTransform(temperature))
        segment.append_prompt(text[:PROMPT])
        segment.append_response(text[PROMPT:], found, [0] * LENGTH, "length")
        made.append(Trajectory(Attempt(Episode("guess_number", row // 2, purpose), row % 2), f"n{row}", 0, 0, [segment], "terminated"))
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one version of a policy with steep logits, and what it has sampled."""
    folder = tmp_path_factory.mktemp("runs") / "sampled"
    policy = build_policy(folder / "policy", ["guess 1 2 3"], vocab=300, hidden=32, layers=1, heads=2, feed_forward=32, context=64)
    model = init_model(load_config(policy), 0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    WeightStore(str(folder / "weights")).publish(weights, step=0, files=model_files(policy), background=False).result()
    (folder / "config.yaml").write_text(CONFIG)
    store = RunFolder(str(folder)).store
    everything = sampled(model)
    store.write("trajectories/part-00000.parquet", encode(everything[:50]))
    store.write("trajectories/flushed/00000000000001-a-000000.parquet", encode(everything[50:] + sampled(model, "warm_up")))
    return folder


def told(*arguments: object) -> dict[str, Any]:
    """The last line of `rollart draft --json`."""
    result = CliRunner().invoke(main, ["draft", *map(str, arguments), "--json"])
    assert result.exit_code in (0, 2), result.output
    said: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return said


def test_a_head_learns_from_what_a_policy_sampled_and_is_a_version_that_an_engine_takes(run: Path, tmp_path: Path) -> None:
    said = told(run, "--set", f"draft_training.folder={tmp_path / 'head'}", "--set", "training.draft.kept=200")
    assert said["version"] == "0-0"
    assert said["store"] == str(run / "heads")
    assert len(said["after"]) == 2
    assert all(after > before + 0.1 for before, after in zip(said["before"], said["after"], strict=True)), said
    store = WeightStore(said["store"])
    held = store.pull()
    assert json.loads(store.file(None, "config.json"))["kept"] == 200
    assert len(held["kept"]) == 200
    assert 1 in held["kept"]  # what ends a response
    assert read_config(tmp_path / "head").kept == 200
    metadata = store.commit(store.resolve()).metadata
    assert metadata["policy"] == f"{run / 'weights'}@newest"
    assert metadata["after"] == said["after"]


def test_equal_seeds_make_equal_heads_and_each_is_the_next_version(run: Path, tmp_path: Path) -> None:
    few = ("--set", "draft_training.steps=2", "--set", f"draft_training.store={tmp_path / 'heads'}")
    made = [told(run, *few) for _ in range(2)] + [told(run, *few, "--set", "run.seed=4")]
    assert [m["version"] for m in made] == ["0-0", "0-1", "0-2"]
    store = WeightStore(str(tmp_path / "heads"))
    first, again, other = (store.pull(v) for v in store.versions())
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_a_head_goes_on_from_one_that_is_there(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "heads"
    into = ("--set", f"draft_training.store={store}")
    first = told(run, *into, "--set", "draft_training.steps=20")
    later = told(run, *into, "--set", "draft_training.steps=0", "--set", f"training.draft.model={store}@0-0")
    assert later["before"] == pytest.approx(first["after"], abs=1e-6)


def test_no_episode_is_on_both_sides_and_every_task_is_held_out() -> None:
    trajectories = [
        Trajectory(Attempt(Episode(task, i), m), f"{task}{i}-{m}", 0, 0, [], "terminated") for task in "ab" for i in range(10) for m in (0, 1)
    ]
    texts = split_texts(trajectories, 0.2, seed=1)
    held = {t.attempt.episode for t in texts.held_out}
    assert not held & {t.attempt.episode for t in texts.learnt}
    assert [sum(e.task == task for e in held) for task in "ab"] == [2, 2]
    assert len(texts.held_out) == 8
    assert len(texts.learnt) == 32


def test_what_cannot_be_trained_on_is_refused_in_a_line(run: Path, tmp_path: Path) -> None:
    few = ("--set", "draft_training.steps=1")
    empty, scripted = tmp_path / "empty", tmp_path / "scripted"
    for folder in (empty, scripted):
        shutil.copytree(run, folder, ignore=shutil.ignore_patterns("trajectories", "heads"))
    warm_up = sampled(init_model(load_config(run / "policy"), 0), "warm_up")
    RunFolder(str(scripted)).store.write("trajectories/part-00000.parquet", encode(warm_up))
    for folder in (empty, scripted):
        assert "holds no trajectory that a policy sampled" in told(folder, *few)["error"]
    assert "holds no run" in told(tmp_path / "nowhere", *few)["error"]
    assert "0-7" in told(run, *few, "--set", "draft_training.policy=0-7")["error"]
    other = build_policy(tmp_path / "other", ["quite another text"], vocab=300, hidden=32, layers=1, heads=2, feed_forward=32, context=64)
    assert "has another tokenizer" in told(run, *few, "--set", f"draft_training.policy={other}")["error"]
    assert "draft_training.folder" in told(run, *few, "--set", f"draft_training.folder={run}")["error"]
    assert "kept is 9999" in told(run, *few, "--set", "training.draft.kept=9999")["error"]
    assert "draft_training.step:" in told(run, "--set", "draft_training.step=1")["error"]
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in told(run, "--set", "draft_training.steps=100000", "--set", f"draft_training.store={tmp_path / 'file'}")["error"]
    assert not (empty / "heads").exists()


def test_a_run_whose_own_head_learns_online_is_learnt_from_with_fewer_tokens(run: Path, tmp_path: Path) -> None:
    online = shutil.copytree(run, tmp_path / "online", ignore=shutil.ignore_patterns("heads"))
    config = yaml.safe_load(CONFIG)
    config["training"]["draft"]["online"] = True
    config["engine"] = {**config.get("engine", {}), "speculation": {"draft": "head"}}
    (online / "config.yaml").write_text(yaml.safe_dump(config))
    assert told(online, "--set", "draft_training.steps=1", "--set", "training.draft.kept=50")["version"] == "0-0"
