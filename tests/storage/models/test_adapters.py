"""Adapters as versions: peft loads what is exported, all merge alike, and the base is there as long as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from storage.copying import copy_version
from storage.errors import Damaged, FolderRefused, UnknownTensor
from storage.keeping.retention import Retention
from storage.models.adapters import BASE, CONFIG_FILE, PREFIX, Adapter, Whole, adapter_of, base_of, bases, digest_of, publish_base, verify_with_bases
from storage.models.huggingface import export_adapter, export_folder
from storage.models.model import Model
from storage.version import Version
from storage.weights import WeightStore

peft = pytest.importorskip("peft", reason="peft comes with the dev extra")

IDS = torch.arange(9).unsqueeze(0)
CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(vocab_size=13, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1),  # weights are [in, out]
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


class Trained:
    """A model that peft has given adapters other than zero, and its versions in a store."""

    def __init__(self, url: str, family: str = "llama", versions: int = 2, full_every: int = 1) -> None:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(CONFIGS[family])
        self.base_state = {n: v.clone() for n, v in base.state_dict().items()}
        tied = {"lm_head.weight"} if base.config.tie_word_embeddings else set()
        plain = {n: v for n, v in self.base_state.items() if n not in tied}
        config = peft.LoraConfig(r=2, lora_alpha=6.0, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, config)
        self.store = WeightStore(url, full_every=full_every)
        files = {"config.json": base.config.to_json_string().encode(), "tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
        self.digest = publish_base(self.store, plain, files)
        said = Adapter(2, 6.0, sorted(config.target_modules), config.fan_in_fan_out, self.digest)
        about = {**config.to_dict(), "peft_type": "LORA", "target_modules": sorted(config.target_modules)}
        self.files = {**files, CONFIG_FILE: json.dumps(about).encode()}
        for step in range(versions):
            for name, p in self.model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(p, std=0.3)
            state = peft.get_peft_model_state_dict(self.model)
            assert all(n.startswith(PREFIX) for n in state)
            self.store.publish(state, version=Version(0, step), metadata=said.document(), files=self.files).result()

    def base(self) -> Any:
        model = AutoModelForCausalLM.from_config(self.model.config)
        model.load_state_dict(self.base_state)
        return model


@pytest.mark.parametrize("family", CONFIGS)
def test_an_exported_adapter_is_loaded_by_peft_and_an_exported_whole_by_transformers(tmp_path: Path, family: str) -> None:
    trained = Trained(str(tmp_path / "weights"), family)
    names = export_adapter(trained.store, Version(0, 1), str(tmp_path / "adapter"))
    assert names == sorted(["adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"])
    theirs = peft.PeftModel.from_pretrained(trained.base(), tmp_path / "adapter")
    assert torch.equal(logits(theirs), logits(trained.model))
    said = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_bytes())
    assert said["base_model_name_or_path"] == f"{trained.store.url}/bases/{trained.digest}@0-0"
    with Model(said["base_model_name_or_path"]).folder() as base:
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(base)), logits(trained.base()))

    export_folder(trained.store, Version(0, 1), str(tmp_path / "whole"))
    assert CONFIG_FILE not in {p.name for p in (tmp_path / "whole").iterdir()}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert float((logits(whole) - logits(trained.model)).abs().max()) < 1e-5
    assert float((logits(whole) - logits(trained.base())).abs().max()) > 1e-2
    merged = Whole(trained.store, Version(0, 1)).pull()
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(merged[n], v) for n, v in saved.items()) and set(saved) == set(Whole(trained.store, Version(0, 1)).tensors)


def test_a_whole_in_several_files_is_the_same_as_in_one(tmp_path: Path) -> None:
    trained = Trained(str(tmp_path / "weights"))
    assert len(export_folder(trained.store, Version(0, 1), str(tmp_path / "many"), shard_bytes=2000)) > 5
    many = AutoModelForCausalLM.from_pretrained(tmp_path / "many").state_dict()
    merged = Whole(trained.store, Version(0, 1)).pull()
    assert all(torch.equal(many[n], v) for n, v in merged.items())


def test_a_folder_holds_either_a_model_or_an_adapter_when_one_replaces_the_other(tmp_path: Path) -> None:
    trained, target = Trained(str(tmp_path / "weights")), str(tmp_path / "out")
    export_folder(trained.store, Version(0, 1), target)
    with pytest.raises(FolderRefused):
        export_adapter(trained.store, Version(0, 1), target)
    export_adapter(trained.store, Version(0, 1), target, force=True)
    assert {p.name for p in Path(target).iterdir()}.isdisjoint({"config.json", "model.safetensors"})
    export_folder(trained.store, Version(0, 1), target, force=True)
    assert {p.name for p in Path(target).iterdir()}.isdisjoint({CONFIG_FILE, "adapter_model.safetensors"})
    with pytest.raises(FolderRefused, match="no adapter"):
        export_adapter(base_of(trained.store, trained.digest), BASE, str(tmp_path / "base"))


def test_no_collection_takes_the_base_and_an_equal_base_is_stored_once(tmp_path: Path) -> None:
    trained = Trained(str(tmp_path / "weights"), versions=3)
    before = Whole(trained.store, Version(0, 2)).pull()
    for _ in range(3):
        trained.store.gc(Retention(keep_last=1), grace_s=0.0, now=2e9)  # long after everything was written
    assert trained.store.versions() == [Version(0, 2)]
    after = Whole(trained.store, Version(0, 2)).pull()
    assert all(torch.equal(after[n], v) for n, v in before.items())
    data = sorted((tmp_path / "weights" / "bases").rglob("*"))
    assert publish_base(trained.store, dict(reversed(base_of(trained.store, trained.digest).pull().items())), {}) == trained.digest
    assert sorted((tmp_path / "weights" / "bases").rglob("*")) == data and len(bases(trained.store)) == 1


def test_versions_stored_as_changes_merge_alike(tmp_path: Path) -> None:
    trained = Trained(str(tmp_path / "weights"), versions=3, full_every=3)
    for step in range(2):
        plain = Trained(str(tmp_path / f"plain{step}"), versions=step + 1)
        one, other = (Whole(t.store, Version(0, step)).pull() for t in (trained, plain))
        assert all(torch.equal(one[n], v) for n, v in other.items())


def test_a_copy_takes_the_base_along_and_a_missing_or_damaged_one_is_told(tmp_path: Path) -> None:
    trained, target = Trained(str(tmp_path / "weights")), WeightStore(str(tmp_path / "copy"))
    copy_version(trained.store, Version(0, 1), target)
    one, other = (Whole(s, Version(0, 1)).pull() for s in (trained.store, target))
    assert all(torch.equal(one[n], v) for n, v in other.items())
    assert verify_with_bases(target).sound and verify_with_bases(target).bytes > target.verify().bytes

    chunk = max((p for p in (tmp_path / "copy" / "bases").rglob("c/*")), key=lambda p: p.stat().st_size)
    chunk.write_bytes(bytes(chunk.stat().st_size))
    damages = verify_with_bases(target, "0-1").damages
    assert damages and all(d.path.startswith(f"bases/{trained.digest}/data/") and d.version == Version(0, 1) for d in damages)
    for p in sorted((tmp_path / "copy" / "bases").rglob("*"), reverse=True):
        p.rmdir() if p.is_dir() else p.unlink()
    assert [d.reason for d in verify_with_bases(target).damages] == ["is missing, the base of an adapter"]
    with pytest.raises(Damaged, match="base of an adapter"):
        Whole(target, Version(0, 1))


def test_an_adapter_of_another_model_or_rank_is_refused_before_anything_changes(tmp_path: Path) -> None:
    trained = Trained(str(tmp_path / "weights"), versions=1)
    state = trained.store.pull(Version(0, 0))
    said = adapter_of(trained.store.commit(Version(0, 0)), trained.store.url)
    assert said is not None and (said.rank, said.alpha, said.base) == (2, 6.0, trained.digest)
    other = Adapter(3, 6.0, said.targets, False, said.base)
    stray = {f"{PREFIX}nowhere.lora_A.weight": torch.ones(2, 4), f"{PREFIX}nowhere.lora_B.weight": torch.ones(4, 2)}
    for step, (changes, about) in enumerate([(state, other), ({**state, **stray}, said), (dict(list(state.items())[1:]), said)], 1):
        trained.store.publish(changes, version=Version(0, step), metadata=about.document(), files=trained.files).result()
        with pytest.raises(UnknownTensor, match="different models"):
            Whole(trained.store, Version(0, step)).pull()


SAID = {"rank": 2, "alpha": 1.0, "targets": ["q"], "transposed": False, "base": "0" * 64}


@pytest.mark.parametrize("said", ["x", {"rank": 2}, {**SAID, "rank": 0}, {**SAID, "base": "../../etc"}, {**SAID, "dora": True}])
def test_what_a_version_says_of_its_adapter_is_checked(tmp_path: Path, said: Any) -> None:
    store = WeightStore(str(tmp_path))
    store.publish({"w": torch.ones(2)}, version=Version(0, 0), metadata={"adapter": said}).result()
    with pytest.raises(Damaged, match=f"in {re.escape(str(tmp_path))} is damaged: what it says of its adapter"):
        Whole(store, Version(0, 0))


def test_a_digest_tells_names_types_shapes_and_values_apart() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    others = [
        {"a": torch.zeros(3, 2), "b": one["b"]}, {"a": one["a"], "c": one["b"]}, {"a": one["a"], "b": one["b"].half()},
        {"a": one["a"], "b": 2 * one["b"]}, {"a": one["a"]},
    ]  # fmt: skip
    assert len({digest_of(s) for s in (one, *others)}) == 6
    assert digest_of({"b": one["b"].clone(), "a": one["a"]}) == digest_of(one)
