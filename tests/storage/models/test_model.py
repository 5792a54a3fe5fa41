"""What a model's location means, and that what stands there can be told before, and loaded after, it is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from storage.errors import BadReference, FolderRefused, StoreError, UnknownTag, VersionMissing
from storage.models.folders import upload_folder
from storage.models.huggingface import import_folder
from storage.models.model import Model
from storage.version import Version
from storage.weights import WeightStore

Place = tuple[str, dict[str, Any]]
NAMES = {"config.json", "generation_config.json", "tokenizer.json"}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=24, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "original")
    (tmp_path / "original" / "tokenizer.json").write_text("{}")
    return tmp_path / "original"


def first_weight(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).model.embed_tokens.weight.detach()


def test_a_version_a_tag_and_the_newest_are_each_a_model(original: Path, place: Place) -> None:
    store = WeightStore(f"{place[0]}/weights", place[1])
    import_folder(store, str(original))
    files = {name: store.file(Version(0, 0), name) for name in NAMES}
    changed = {name: tensor + 1 for name, tensor in store.pull().items()}
    store.publish(changed, version=Version(0, 1), files=files).result()
    store.tag("start", Version(0, 0))
    for ref, added in (("0-0", 0.0), ("start", 0.0), ("newest", 1.0)):
        model = Model(f"{store.url}@{ref}", place[1])
        assert str(model) == f"{store.url}@{ref}" and model.names() == NAMES and model.file("tokenizer.json") == b"{}"
        with model.folder() as folder:
            assert torch.equal(first_weight(folder), first_weight(original) + added)
        assert not folder.exists()


def test_a_folder_is_a_model_wherever_it_is(original: Path, place: Place) -> None:
    (original / "notes.txt").write_text("not part of it")
    upload_folder(original, f"{place[0]}/model", place[1])
    model = Model(f"{place[0]}/model", place[1])
    assert model.names() == NAMES and model.file("tokenizer.json") == b"{}"
    with model.folder() as folder:
        assert torch.equal(first_weight(folder), first_weight(original))
    assert folder.exists() == ("://" not in place[0])  # a copy is removed, the folder itself is not


def test_a_local_folder_whose_name_has_an_at_is_that_folder(original: Path, tmp_path: Path) -> None:
    original.rename(tmp_path / "model@v1")
    assert Model(str(tmp_path / "model@v1")).names() == NAMES


@pytest.mark.parametrize(
    ("ref", "kind", "says"),
    [
        ("@0-9", VersionMissing, "doesn't hold version 0-9"),
        ("@worst", UnknownTag, "has no tag 'worst'"),
        ("@", BadReference, "can't be a tag"),
        ("", FolderRefused, "say which one is meant, such as .*@newest"),
        ("/none", StoreError, "none"),
    ],
)
def test_what_is_not_there_is_one_error(original: Path, tmp_path: Path, ref: str, kind: type[StoreError], says: str) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    import_folder(store, str(original))
    with pytest.raises(kind, match=says):
        Model(f"{store.url}{ref}").names()


def test_a_version_without_files_has_none_and_is_no_folder(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    store.publish({"w": torch.ones(1)}, version=Version(0, 0)).result()
    model = Model(f"{store.url}@newest")
    assert model.names() == set()
    with pytest.raises(FolderRefused, match=r"no config\.json for version 0-0"), model.folder():
        pass
