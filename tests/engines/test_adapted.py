"""An engine that holds a base takes adapters alone: what is served is the trainer's merged weights, and the base is read once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rollart.engines.embedded.model import PolicyModel, WeightsError
from rollart.engines.weight_cache import WeightCache
from rollart.training.settings import LearnerSettings
from rollart.training.worker import LearnerPlugin
from storage.version import Version
from storage.weights import WeightStore

pytest.importorskip("peft", reason="peft comes with the dev extra")


@pytest.fixture(scope="module")
def policy(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny.model().save_pretrained(folder)
    return folder


@pytest.fixture
def trainer(policy: Path, tmp_path: Path) -> Iterator[LearnerPlugin]:
    settings = LearnerSettings.model_validate({"model": {"lora": {"rank": 2, "alpha": 4.0}}})
    plugin = LearnerPlugin(str(policy), settings, lambda _: [], weights_url=str(tmp_path / "weights"), checkpoints_url=str(tmp_path / "checkpoints"))
    plugin.setup(None)  # type: ignore[arg-type]  # it asks nothing of the worker
    _ = plugin.learner  # there before another is begun: transformers loads one model at a time in a process
    yield plugin
    plugin.teardown(None)  # type: ignore[arg-type]


@pytest.fixture
def cache(trainer: LearnerPlugin, tmp_path: Path) -> Iterator[WeightCache]:
    cache = WeightCache(WeightStore(trainer.weights.url), tmp_path / "shm", alone=True)
    yield cache
    cache.close()


def publish(trainer: LearnerPlugin, step: int, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Publishes adapters that are drawn anew; the whole weights, as the trainer has them."""
    with torch.no_grad():
        for p in trainer.learner.policy.parameters().values():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step if seed is None else seed)) / 10)
    metadata, files = trainer.described({"step": step})
    trainer.weights.publish(trainer.learner.adapters(), version=Version(0, step), metadata=metadata, files=files).result()
    return trainer.learner.weights()


def whole(policy: Path, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """A folder of whole weights, which an engine reads without knowing of adapters."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return folder


def staged(model: PolicyModel, folder: Path) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.stage(folder).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit; oneDNN's own order of a matrix is compared by what it makes of vectors."""
    assert one.keys() == other.keys()
    return all(torch.equal(a.to_dense() if a.is_mkldnn else a, b.to_dense() if b.is_mkldnn else b) for a, b in ((one[n], other[n]) for n in one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_versions_one_after_the_other_are_served_as_if_each_had_come_merged_and_nothing_adds_up_over_many(
    trainer: LearnerPlugin, cache: WeightCache, policy: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    adapted, merged = (PolicyModel(policy, dtype, torch.device("cpu")) for _ in range(2))
    for step in range(12):
        weights = publish(trainer, step, seed=step % 5)
        now = staged(adapted, cache.fetch(Version(0, step)))
        assert same(now, staged(merged, whole(policy, weights, tmp_path / f"whole-{step}")))
        adapted.swap(now)


def test_only_an_adapters_own_bytes_are_read_once_the_base_is_there_which_may_be_gone_by_then(
    trainer: LearnerPlugin, cache: WeightCache, policy: Path
) -> None:
    model = PolicyModel(policy, torch.float32, torch.device("cpu"))
    read = []
    for step in range(3):
        publish(trainer, step)
        folder = cache.fetch(Version(0, step))
        base, own = folder / "base" / "model.safetensors", folder / "adapter_model.safetensors"
        assert base.stat().st_ino == next(cache.folder.glob("base-*")).stat().st_ino  # a link: no byte of it was copied
        sizes = base.stat().st_size, own.stat().st_size
        if step:
            os.unlink(base)
        before = model.bytes_read
        model.swap(model.stage(folder))
        read.append(model.bytes_read - before)
    assert read == [sum(sizes), sizes[1], sizes[1]] and sizes[1] < sizes[0] / 10


def test_another_base_takes_the_place_of_the_one_before_and_whole_weights_that_of_both(
    trainer: LearnerPlugin, cache: WeightCache, policy: Path, tmp_path: Path
) -> None:
    adapted, merged = (PolicyModel(policy, torch.float32, torch.device("cpu")) for _ in range(2))
    publish(trainer, 0)
    adapted.swap(adapted.stage(cache.fetch(Version(0, 0))))
    trainer.learner.load_weights(trainer.learner.weights())  # what was an adapter is in the base from here on
    trainer.forget()
    weights = publish(trainer, 1)
    folder = whole(policy, weights, tmp_path / "whole")
    assert same(staged(adapted, cache.fetch(Version(0, 1))), staged(merged, folder))
    before = adapted.bytes_read
    adapted.swap(adapted.stage(folder))
    assert adapted.bytes_read - before == (folder / "model.safetensors").stat().st_size
    weights = publish(trainer, 2)
    assert same(staged(adapted, cache.fetch(Version(0, 2))), staged(merged, whole(policy, weights, tmp_path / "more")))


def test_an_adapter_of_another_model_a_damaged_one_or_numbers_that_are_none_are_refused_and_what_is_served_stays(
    trainer: LearnerPlugin, cache: WeightCache, policy: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    model = PolicyModel(policy, torch.float32, torch.device("cpu"))
    publish(trainer, 0)
    folder = cache.fetch(Version(0, 0))
    right = staged(model, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(n for n in sorted(tensors) if ".lora_A." in n)
    for value, message in ((tensors[name][:, :-1].contiguous(), "fit no weight of its base"), (tensors[name] * float("nan"), "not finite")):
        (folder / "adapter_model.safetensors").unlink()  # another file: what is loaded may be a view of the old one
        save_file({**tensors, name: value}, folder / "adapter_model.safetensors")
        with pytest.raises(WeightsError, match=message):
            model.stage(folder)
    (folder / "adapter_model.safetensors").unlink()
    save_file({**tensors, name.replace("layers.0", "layers.7"): tensors[name].clone()}, folder / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match="fit no weight of its base"):
        model.stage(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(WeightsError, match="cannot be read"):
        model.stage(folder)
    (folder / "adapter_model.safetensors").unlink()
    save_file(tensors, folder / "adapter_model.safetensors")
    assert same(staged(model, folder), right)


async def test_a_served_adapter_says_what_its_merged_weights_say(
    trainer: LearnerPlugin, cache: WeightCache, policy: Path, tiny: Any, start_engine: Callable[..., str], wire_to: Any, logprobs: Any
) -> None:
    async with wire_to(start_engine("--model", str(policy), "--slots", "4", "--max-length", "64")) as wire:
        for step in range(3):
            weights = publish(trainer, step)
            folder = cache.fetch(Version(0, step))
            before = (await wire.get("/v1/loads"))[1]["weight_bytes_read"]
            assert (await wire.update(folder, f"0-{step}"))[0] == 200
            read = (await wire.get("/v1/loads"))[1]["weight_bytes_read"] - before
            own, base = ((folder / path).stat().st_size for path in ("adapter_model.safetensors", "base/model.safetensors"))
            assert read == (own if step else own + base)
            model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
            model.load_state_dict(weights, strict=False)
            reply = await wire.generate(tiny.prompt(9), 12, temperature=1.0, sampling_seed=step)
            expected = tiny.logprobs(model, tiny.prompt(9), reply["output_ids"])
            assert logprobs(reply) == pytest.approx(expected, abs=1e-4) and reply["meta_info"]["weight_version"] == f"0-{step}"


def test_caches_that_merge_and_ones_that_do_not_share_a_host(trainer: LearnerPlugin, cache: WeightCache, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    merging = WeightCache(WeightStore(trainer.weights.url), tmp_path / "shm")
    for step, (first, second) in enumerate([(cache, merging), (merging, cache)]):
        weights = publish(trainer, step)
        folders = {c: c.fetch(Version(0, step)) for c in (first, second)}
        found = load_file(folders[merging] / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        assert sorted(p.name for p in folders[merging].glob("*.safetensors")) == ["model.safetensors"]
        assert (folders[cache] / "adapter_model.safetensors").exists() is (first is cache)  # whole ones that are there do as well
    merging.close()
