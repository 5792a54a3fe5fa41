"""A run that trains adapters: its versions are adapters over one base, it is gone on from, and what it published starts others."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.models.adapters import Whole, adapter_of, bases
from storage.models.huggingface import export_adapter, export_folder
from storage.version import Version

peft = pytest.importorskip("peft", reason="peft comes with the dev extra")

# (REINFORCE and the entropy bonus have something to learn from also where all members of every group score the same.)
LORA = (
    "training.model.lora={rank: 4, alpha: 16.0}",
    "training.advantage.name=reinforce",
    "evaluate.episodes=4",
    "evaluate.every=0",
    "train.checkpoint_every=1",
)


@pytest.fixture(scope="module")
def trained(place: Any) -> SimpleNamespace:
    """A run of two steps and, resumed, of a third."""
    place.finish("adapters", "train.steps=2", *LORA)
    base = [b.url for b in bases(place.weights("adapters"))]
    place.finish("adapters", "train.steps=3", *LORA, resume=True)
    return SimpleNamespace(store=place.weights("adapters"), base=base)


@pytest.mark.slow
def test_versions_are_adapters_over_one_base_that_a_resumed_run_finds_again(trained: SimpleNamespace) -> None:
    store = trained.store
    assert [str(v) for v in store.versions()] == ["0-0", "0-1", "0-2", "1-2", "1-3"]
    about = [adapter_of(store.commit(v), store.url) for v in store.versions()]
    assert {(a.rank, a.alpha) for a in about if a is not None} == {(4, 16.0)} and None not in about
    assert [b.url for b in bases(store)] == trained.base and len(trained.base) == 1
    (base,) = bases(store)
    assert store.bytes_to_pull(Version(1, 3)) < base.bytes_to_pull(Version(0, 0)) / 2
    one, other = store.pull(Version(0, 2)), store.pull(Version(1, 2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_trainer_and_engine_agree_on_what_the_merged_adapters_say(place: Any, trained: SimpleNamespace) -> None:
    drifts = [line["train"]["drift"] for line in place.metrics("adapters", "step") if line["train"]["drift"] is not None]
    assert drifts and max(drifts) < 1e-4
    assert sum(line["train"]["drift_alarm"] for line in place.metrics("adapters", "step")) == 0


@pytest.mark.slow
def test_an_evaluation_and_a_training_of_whole_weights_start_from_an_adapters_version(place: Any, trained: SimpleNamespace) -> None:
    moved = place.folder / "moved"
    shutil.copytree(place.run("adapters") / "weights", moved)  # with nothing else of the run
    place.finish("measured", f"policy={{model: '{moved}@1-3'}}", "evaluate.episodes=4", flow="evaluate")
    found, expected = place.weights("measured").pull(), Whole(trained.store, Version(1, 3)).pull()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_peft_loads_what_is_exported_and_says_the_same_as_the_merged_model(place: Any, trained: SimpleNamespace) -> None:
    (base,) = bases(trained.store)
    for name, write in (("base", lambda to: export_folder(base, None, to)), ("whole", lambda to: export_folder(trained.store, Version(1, 3), to))):
        write(str(place.folder / name))
    export_adapter(trained.store, Version(1, 3), str(place.folder / "adapter"))
    plain, whole = (AutoModelForCausalLM.from_pretrained(place.folder / name).eval() for name in ("base", "whole"))
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        expected, start = whole(input_ids=ids).logits, plain(input_ids=ids).logits
        found = peft.PeftModel.from_pretrained(plain, place.folder / "adapter").eval()(input_ids=ids).logits
    assert float((found - expected).abs().max()) < 1e-5 < float((start - expected).abs().max())


@pytest.mark.slow
def test_whole_weights_are_published_where_they_are_asked_for(place: Any) -> None:
    place.finish("merged", "train.steps=1", *LORA[1:], "warm_up.steps=2", "training.model.lora={rank: 2, publish: merged}")
    store = place.weights("merged")
    assert [adapter_of(store.commit(v), store.url) for v in store.versions()] == [None, None] and bases(store) == []
