"""What a host makes of versions that are adapters: the base comes once, then the adapters alone, and engines load whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from rollart.engines.weight_cache import WeightCache
from rollart.training.settings import LearnerSettings
from rollart.training.worker import LearnerPlugin
from storage.errors import Damaged
from storage.models.adapters import bases
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore

pytest.importorskip("peft", reason="peft comes with the dev extra")


class Counting(ObjectStore):
    """A real store that counts the bytes of chunks that are read from it, and from all below it."""

    read_bytes = 0

    def read_into(self, path: str, buffer: Any, *args: Any, **kwargs: Any) -> int:
        Counting.read_bytes += sum(b.nbytes for b in (buffer if isinstance(buffer, list | tuple) else [buffer]))
        return super().read_into(path, buffer, *args, **kwargs)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[LearnerPlugin]:
    folder = tmp_path / "policy"
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    ).save_pretrained(folder)
    settings = LearnerSettings.model_validate({"model": {"lora": {"rank": 2, "alpha": 4.0}}})
    plugin = LearnerPlugin(str(folder), settings, lambda _: [], weights_url=str(tmp_path / "weights"), checkpoints_url=str(tmp_path / "checkpoints"))
    plugin.setup(None)  # type: ignore[arg-type]  # it asks nothing of the worker
    yield plugin
    plugin.teardown(None)  # type: ignore[arg-type]


def publish(trainer: LearnerPlugin, step: int) -> dict[str, torch.Tensor]:
    """Publishes adapters that are drawn anew; the whole weights, as the trainer has them."""
    with torch.no_grad():
        for p in trainer.learner.policy.parameters().values():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) / 10)
    metadata, files = trainer.described({"step": step})
    trainer.weights.publish(trainer.learner.adapters(), version=Version(0, step), metadata=metadata, files=files).result()
    return trainer.learner.weights()


@pytest.mark.parametrize("token", [None, "shared"])
def test_a_host_reads_the_base_once_and_then_adapters_alone_and_has_the_trainers_merged_weights_bit_for_bit(
    trainer: LearnerPlugin, tmp_path: Path, token: str | None
) -> None:
    cache = WeightCache(WeightStore.over(Counting(trainer.weights.url)), tmp_path / "shm", token=token)
    peers = [url for url in [cache.chunk_server()] if url is not None]
    read = []
    for step in range(3):
        expected = publish(trainer, step)
        Counting.read_bytes = 0
        found = load_file(cache.fetch(Version(0, step), peers) / "model.safetensors")
        read.append(Counting.read_bytes if token is None else cache.stats.store)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())
    (base,) = bases(trainer.weights)
    whole, adapter = base.bytes_to_pull(Version(0, 0)), trainer.weights.bytes_to_pull(Version(0, 1))
    assert adapter < whole / 10
    if token is None:
        assert read == [whole + adapter, adapter, adapter]
    else:
        assert read == [adapter, 2 * adapter, 3 * adapter]  # so far, of what may come from peers: the base does not
    cache.close()
    assert not cache.folder.exists()


def test_an_engine_starts_on_any_version_though_all_others_and_the_trainer_are_gone(trainer: LearnerPlugin, tmp_path: Path) -> None:
    publish(trainer, 0)
    expected = publish(trainer, 1)
    cache = WeightCache(WeightStore(trainer.weights.url), tmp_path / "shm")
    found = load_file(cache.fetch(Version(0, 1)) / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    cache.close()


def test_a_base_that_is_gone_is_damage_of_the_version_and_the_held_one_stays(trainer: LearnerPlugin, tmp_path: Path) -> None:
    publish(trainer, 0)
    cache = WeightCache(WeightStore(trainer.weights.url), tmp_path / "shm")
    held = cache.fetch(Version(0, 0))
    publish(trainer, 1)
    ObjectStore(trainer.weights.url).delete("bases", recursive=True)
    with pytest.raises(Damaged, match="base of an adapter"):
        cache.fetch(Version(0, 1))
    assert (held / "model.safetensors").exists()
    cache.close()


def test_another_base_replaces_the_one_that_the_host_had(trainer: LearnerPlugin, tmp_path: Path) -> None:
    cache = WeightCache(WeightStore(trainer.weights.url), tmp_path / "shm")
    publish(trainer, 0)
    cache.fetch(Version(0, 0))
    trainer.learner.load_weights(trainer.learner.weights())  # what was an adapter is in the base from here on
    trainer.forget()
    expected = publish(trainer, 1)
    found = load_file(cache.fetch(Version(0, 1)) / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(bases(trainer.weights)) == 2 and len(list(cache.folder.glob("base-*"))) == 1
    cache.close()
