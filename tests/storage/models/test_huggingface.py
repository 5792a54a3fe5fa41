"""Versions as Hugging Face folders and back: transformers loads what is written, and nothing hostile is read."""

from __future__ import annotations

import json
import pickle
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from storage.errors import FolderRefused, UnsafePath, UnsupportedTensor, VersionMissing, VersionTaken
from storage.models.huggingface import export_folder, import_folder
from storage.models.safetensors_files import parts
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore

Place = tuple[str, dict[str, Any]]
FIRST = Version(0, 0)
TOKENIZER = b'{"version": "1.0"}'


def llama(tied: bool, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, tie_word_embeddings=tied, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def saved(model: LlamaForCausalLM, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    return folder


def published(store: WeightStore, model: LlamaForCausalLM, version: Version = FIRST) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    files = {"config.json": model.config.to_json_string().encode(), "tokenizer.json": TOKENIZER}
    store.publish(state, version=version, files=files).result()
    return state


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name].dtype, one[name].shape, bits(one[name])) == (other[name].dtype, other[name].shape, bits(other[name])), name


@pytest.fixture
def store() -> WeightStore:
    return WeightStore(f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 4000])
def test_transformers_loads_what_was_exported_bit_for_bit(
    store: WeightStore, tmp_path: Path, tied: bool, dtype: torch.dtype, shard_bytes: int
) -> None:
    model = llama(tied, dtype)
    state = published(store, model)
    names = export_folder(store, FIRST, str(tmp_path / "out"), shard_bytes=shard_bytes)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    loaded, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype, local_files_only=True, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    assert_equal(dict(loaded.state_dict()), state)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_tied_head_is_left_out_as_transformers_leaves_it_out(store: WeightStore, tmp_path: Path) -> None:
    model = llama(tied=True)
    published(store, model)
    export_folder(store, FIRST, str(tmp_path / "ours"))
    saved(model, tmp_path / "theirs")
    assert_equal(load_file(tmp_path / "ours" / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors"))


def test_tensors_that_only_the_version_ties_stand_under_each_name(store: WeightStore, tmp_path: Path) -> None:
    model = llama(tied=False)
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    store.publish(state, version=FIRST, files={"config.json": model.config.to_json_string().encode()}).result()
    export_folder(store, FIRST, str(tmp_path / "out"))
    loaded, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, output_loading_info=True)
    assert not said["missing_keys"]
    assert_equal(dict(loaded.state_dict()), state)
    back = import_folder(store, str(tmp_path / "out"))
    assert store.commit(back).tensors["lm_head.weight"].alias_of == "model.embed_tokens.weight"


def test_each_file_is_at_most_as_large_as_asked_and_the_index_lists_all(store: WeightStore, tmp_path: Path) -> None:
    state = published(store, llama(tied=False))
    heard: list[tuple[int, int]] = []
    names = export_folder(store, FIRST, str(tmp_path), shard_bytes=3000, progress=lambda *told: heard.append(told))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    shards = [name for name in names if name.endswith(".safetensors")]
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors" and len(shards) > 3
    for shard in shards:
        assert sum(t.nbytes for t in load_file(tmp_path / shard).values()) <= 3000
    assert heard[-1] == (index["metadata"]["total_size"],) * 2 and heard == sorted(heard)


def test_a_folder_goes_through_every_kind_of_store_and_back(place: Place, tmp_path: Path) -> None:
    model = llama(tied=True, dtype=torch.bfloat16)
    source = saved(model, tmp_path / "source")
    weights = WeightStore(f"{place[0]}/weights", place[1])
    version = import_folder(weights, str(source))
    assert version == FIRST and weights.newest() == FIRST
    assert set(weights.commit(version).files) == {"config.json", "generation_config.json", "tokenizer.json"}
    export_folder(weights, None, f"{place[0]}/out", storage_options=place[1])
    out = ObjectStore(f"{place[0]}/out", place[1])
    assert out.read("tokenizer.json") == TOKENIZER and out.read("config.json") == (source / "config.json").read_bytes()
    again = import_folder(weights, f"{place[0]}/out", storage_options=place[1])
    assert_equal(weights.pull(again), weights.pull(version))


def test_a_sharded_folder_of_transformers_own_is_imported(store: WeightStore, tmp_path: Path) -> None:
    model = llama(tied=False)
    saved(model, tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_equal(store.pull(import_folder(store, str(tmp_path))), dict(model.state_dict()))


def test_imports_become_the_newest_version_and_take_nobody_elses_number(store: WeightStore, tmp_path: Path) -> None:
    saved(llama(tied=True), tmp_path)
    assert import_folder(store, str(tmp_path)) == Version(0, 0)
    store.publish({"w": torch.ones(1)}, version=Version(0, 7)).result()
    assert import_folder(store, str(tmp_path), metadata={"why": "test"}) == Version(1, 0)
    assert store.newest() == Version(1, 0)
    assert store.commit(Version(1, 0)).metadata == {"imported": str(tmp_path), "why": "test"}
    assert import_folder(store, str(tmp_path), version=Version(0, 9)) == Version(0, 9)
    with pytest.raises(VersionTaken):
        import_folder(store, str(tmp_path), version=Version(0, 7))


@pytest.mark.many_requests
def test_an_import_that_breaks_off_leaves_the_newest_version_as_it_was(
    tmp_path: Path, dying: Callable[[int], Any], place: Place, killed: type
) -> None:
    saved(llama(tied=True), tmp_path / "model")
    store = WeightStore(*place)
    store.publish({"w": torch.ones(1)}, version=Version(0, 3)).result()
    for left in range(30):
        try:
            import_folder(WeightStore.over(dying(left)), str(tmp_path / "model"))
        except killed:
            assert store.newest() == Version(0, 3)
        else:
            break
    assert left > 5 and store.newest() == Version(max(v.lineage for v in store.versions()), 0)


def test_a_folder_in_use_is_refused_unless_forced_and_force_leaves_no_old_weights(store: WeightStore, tmp_path: Path) -> None:
    published(store, llama(tied=False))
    saved(llama(tied=True), tmp_path, max_shard_size="3KB")
    (tmp_path / "README.md").write_text("mine")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(FolderRefused, match="force"):
        export_folder(store, FIRST, str(tmp_path))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    export_folder(store, FIRST, str(tmp_path), force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert_equal(load_file(tmp_path / "model.safetensors"), dict(llama(tied=False).state_dict()))


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.many_requests
def test_a_crash_at_any_write_leaves_no_folder_that_can_be_loaded(
    store: WeightStore, place: Place, dying: Callable[[int], Any], killed: type, old: bool
) -> None:
    published(store, llama(tied=False))
    plain = ObjectStore(*place)
    for left in range(40):
        for name in plain.list():
            plain.delete(name)
        if old:
            export_folder(store, FIRST, plain, shard_bytes=20000)
        try:
            export_folder(store, FIRST, dying(left), shard_bytes=9000, force=True)
        except killed:
            assert not plain.exists("config.json")
        else:
            break
    assert left > 4 and plain.exists("config.json")


def test_what_is_replaced_can_no_longer_be_loaded_from_the_first_deletion_on(store: WeightStore, tmp_path: Path) -> None:
    published(store, llama(tied=False))
    export_folder(store, FIRST, str(tmp_path), shard_bytes=4000)

    class Stopped(Exception):
        pass

    class Stops(ObjectStore):
        def delete(self, path: str, recursive: bool = False) -> None:
            super().delete(path, recursive)
            raise Stopped

    with pytest.raises(Stopped):
        export_folder(store, FIRST, Stops(str(tmp_path)), force=True)
    assert not (tmp_path / "config.json").exists() and (tmp_path / "tokenizer.json").exists()


def test_without_a_config_the_folder_is_refused_before_anything_is_written(store: WeightStore, tmp_path: Path) -> None:
    store.publish({"w": torch.ones(2)}, version=FIRST).result()
    for files in (None, {"tokenizer.json": b"{}"}):
        with pytest.raises(FolderRefused, match=r"no config\.json for version 0-0"):
            export_folder(store, FIRST, str(tmp_path / "out"), files=files)
    assert not (tmp_path / "out").exists()
    assert export_folder(store, FIRST, str(tmp_path / "out"), files={}) == ["model.safetensors"]
    assert export_folder(store, FIRST, str(tmp_path / "more"), files={"config.json": b"{}"}) == ["config.json", "model.safetensors"]
    with pytest.raises(VersionMissing):
        export_folder(store, Version(3, 3), str(tmp_path / "none"), files={})


@pytest.mark.parametrize("broken", [{"num_attention_heads": 0}, {"hidden_size": 1 << 40, "vocab_size": 1 << 40}])
def test_a_config_of_which_no_model_can_be_built_ties_nothing(store: WeightStore, tmp_path: Path, broken: dict[str, int]) -> None:
    tied = torch.randn(4, 4)
    config = json.dumps({"model_type": "llama", "num_hidden_layers": 1, **broken}).encode()
    store.publish({"model.embed_tokens.weight": tied, "lm_head.weight": tied}, version=FIRST, files={"config.json": config}).result()
    export_folder(store, FIRST, str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tied) for name in ("model.embed_tokens.weight", "lm_head.weight"))


def test_of_a_versions_files_only_config_and_tokenizer_are_written_and_weights_are_never_among_them(store: WeightStore, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "modeling_x.py": b"print()", "adapter_config.json": b"{}", "model.safetensors.index.json": b"{}"}
    store.publish({"w": torch.ones(2)}, version=FIRST, files=files).result()
    assert export_folder(store, FIRST, str(tmp_path / "out")) == ["config.json", "model.safetensors"]
    with pytest.raises(FolderRefused, match=r"model\.safetensors\.index\.json can't be among the files"):
        export_folder(store, FIRST, str(tmp_path / "more"), files=files)
    assert not (tmp_path / "more").exists()


def test_what_safetensors_cannot_hold_is_named_before_anything_is_written(store: WeightStore, tmp_path: Path) -> None:
    store.publish({"fine": torch.ones(2), "odd": torch.ones(2, dtype=torch.complex128)}, version=FIRST).result()
    with pytest.raises(UnsupportedTensor, match="'odd' of complex128"):
        export_folder(store, FIRST, str(tmp_path / "out"), files={})
    assert not (tmp_path / "out").exists()


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _climbing(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder.parent / "outside.safetensors")
    index(folder, {"w": "../outside.safetensors"})


def _absolute(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder.parent / "outside.safetensors")
    index(folder, {"w": str(folder.parent / "outside.safetensors")})


def _missing(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "a.safetensors")
    index(folder, {"w": "a.safetensors", "v": "b.safetensors"})


def _elsewhere(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "a.safetensors")
    index(folder, {"w": "a.safetensors", "v": "a.safetensors"})


def _unlisted(folder: Path) -> None:
    save_file({"w": torch.ones(2), "v": torch.ones(1)}, folder / "a.safetensors")
    index(folder, {"w": "a.safetensors"})


def _lying(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def _short(folder: Path) -> None:
    save_file({"w": torch.ones(100)}, folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])


def _huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def _deep(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map":' + "[" * 100_000)


def _no_map(folder: Path) -> None:
    index(folder, ["a.safetensors"])


def _nothing_listed(folder: Path) -> None:
    index(folder, {})


def _number(folder: Path) -> None:
    index(folder, {"w": 7})


def _pickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))


def _empty(folder: Path) -> None:
    pass


def _false_tie(folder: Path) -> None:
    save_file({"w": torch.ones(2), "v": torch.zeros(2)}, folder / "model.safetensors", {"tied": '{"v": "w"}'})


def _tied_to_nothing(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors", {"tied": '{"v": "x"}'})


def _tied_to_itself(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors", {"tied": '{"w": "w"}'})


def _strange_ties(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors", {"tied": "[" * 50_000})


def _linked_out(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    (folder.parent / "secret").write_text("secret")
    (folder / "tokenizer.json").symlink_to(folder.parent / "secret")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_climbing, "which is no safetensors file of its folder"),
        (_absolute, "which is no safetensors file of its folder"),
        (_missing, r"lacks b\.safetensors"),
        (_elsewhere, "disagree on v"),
        (_unlisted, "disagree on v"),
        (_lying, "is no whole safetensors file"),
        (_short, "is no whole safetensors file"),
        (_huge_header, "is no whole safetensors file"),
        (_deep, "is no index"),
        (_no_map, "lists no tensors"),
        (_nothing_listed, "lists no tensors"),
        (_number, "names '7'"),
        (_pickled, "pytorch_model.bin, a pickle.*convert it to safetensors"),
        (_empty, "has neither model.safetensors nor"),
        (_false_tie, "but they differ"),
        (_tied_to_nothing, "which it doesn't hold"),
        (_tied_to_itself, "which it doesn't hold"),
        (_strange_ties, "isn't JSON"),
        (_linked_out, "is a link out of its folder"),
    ],
)
def test_a_folder_that_lies_is_one_clear_error_and_publishes_nothing(
    store: WeightStore, tmp_path: Path, make: Callable[[Path], None], says: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    with pytest.raises(FolderRefused, match=says):
        import_folder(store, str(folder))
    assert store.objects.list() == []


def test_a_remote_object_whose_name_climbs_out_is_not_downloaded(tmp_path: Path) -> None:
    from storage.models.folders import download

    class Hostile(ObjectStore):
        def infos(self, prefix: str = "") -> Any:
            (found,) = super().infos(prefix)
            return [type(found)("../" + found.path, found.bytes, found.modified)]

    store = Hostile(f"memory://{uuid.uuid4().hex}")
    store.write("config.json", b"{}")
    with pytest.raises(UnsafePath):
        download(store, tmp_path / "inside")
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_of_the_hugging_face_cache_is_imported_through_its_links(store: WeightStore, tmp_path: Path) -> None:
    model = llama(tied=True)
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    saved(model, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    version = import_folder(store, str(snapshot))
    assert store.file(version, "tokenizer.json") == TOKENIZER
    assert torch.equal(store.pull(version)["model.norm.weight"], model.state_dict()["model.norm.weight"])


def test_only_config_and_tokenizer_go_with_the_weights(store: WeightStore, tmp_path: Path) -> None:
    saved(llama(tied=True), tmp_path)
    for name in ("modeling_x.py", ".env", "training_args.bin", "README.md", "run.json"):
        (tmp_path / name).write_text("not this")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    version = import_folder(store, str(tmp_path))
    assert set(store.commit(version).files) == {"chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"}


TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]
NAMES = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Random state dicts: names, types, shapes (empty and scalar ones too), strides, and tensors of several names."""
    state: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        if state and draw(st.booleans()):
            state[name] = state[draw(st.sampled_from(sorted(state)))]
            continue
        dtype = draw(st.sampled_from(TYPES))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        count = int(np.prod(shape)) * dtype.itemsize
        raw = (
            bytes(b & 1 for b in draw(st.binary(min_size=count, max_size=count)))
            if dtype is torch.bool
            else draw(st.binary(min_size=count, max_size=count))
        )
        values = torch.frombuffer(bytearray(raw or b"\0" * 8), dtype=torch.uint8)[:count].clone().view(dtype).reshape(shape)
        state[name] = values.t() if len(shape) == 2 and draw(st.booleans()) else values
    return state


@given(state=states(), shard_bytes=st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_any_state_comes_back_from_a_folder_as_it_was(state: dict[str, torch.Tensor], shard_bytes: int) -> None:
    store = WeightStore(f"memory://{uuid.uuid4().hex}")
    store.publish(state, version=FIRST).result()
    with tempfile.TemporaryDirectory() as folder:
        export_folder(store, FIRST, ObjectStore(folder), files={}, shard_bytes=shard_bytes)
        back = import_folder(store, folder)
    assert_equal(store.pull(back), store.pull(FIRST))
    before, after = store.commit(FIRST).tensors, store.commit(back).tensors
    assert groups(after) == groups(before)


def groups(tensors: Any) -> set[frozenset[str]]:
    """Names that stand for one tensor each."""
    return {
        frozenset(n for n, t in tensors.items() if n == owner or t.alias_of == owner)
        for owner, o in tensors.items()
        if o.alias_of is None and o.numel
    }


def test_our_files_are_laid_out_as_the_format_says() -> None:
    from safetensors.torch import load

    state = {"a": torch.arange(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(0, 3)}
    data = b"".join(part.tobytes() for part in parts(state, {"note": "x"}))
    head = int.from_bytes(data[:8], "little")
    assert head % 8 == 0
    said = json.loads(data[8 : 8 + head])
    assert said["b"]["data_offsets"] == [0, 16] and said["__metadata__"] == {"format": "pt", "note": "x"}
    assert_equal(load(data), state)
