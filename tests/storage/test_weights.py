from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zarr

from storage.arrays.packing import pack
from storage.errors import (
    Damaged,
    DeviceRefused,
    ForkedStore,
    PublishTooLong,
    StoreUnreachable,
    TensorMismatch,
    UnknownFile,
    UnknownTensor,
    UnsafePath,
    UnsupportedTensor,
    VersionMissing,
    VersionPassed,
    VersionTaken,
)  # fmt: skip
from storage.format import layout
from storage.format.dtypes import TORCH_OF
from storage.version import Version
from storage.versions import VersionedStore
from storage.weights import WeightStore
from tests.storage.tensors import of_bits, same

V0 = Version(0, 0)


@pytest.fixture
def weights(place):
    return WeightStore(*place)


def test_every_type_and_shape_comes_back_bit_for_bit(weights):
    shapes = [(), (7,), (3, 0, 2), (5, 4)]
    state = {f"{name}{list(shape)}": of_bits(dtype, *shape) for name, dtype in TORCH_OF.items() for shape in shapes}
    weights.publish(state, version=V0).result(60)
    pulled = weights.pull()
    assert list(pulled) == list(state)
    assert all(same(pulled[name], tensor) for name, tensor in state.items())


def test_views_of_all_strides_come_back_as_they_looked(weights):
    base = torch.arange(60.0).reshape(3, 4, 5)
    state = {
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2, 1::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "part": base[1],
        "one value of a wide stride": base[::3],
        "one value": torch.arange(9.0)[4::7],
        "none of a wide stride": torch.arange(9.0)[9::2],
        "parameter": torch.nn.Parameter(base[2]),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    }
    weights.publish(state, version=V0).result(60)
    pulled = weights.pull()
    for name, tensor in state.items():
        assert torch.equal(pulled[name], tensor), name
    assert not pulled["parameter"].requires_grad


def test_tied_tensors_are_stored_once_and_come_back_tied(weights):
    embedding = torch.randn(100, 8)
    state = {"embed": embedding, "norm": torch.ones(8), "head": embedding, "copy": embedding.clone()}
    weights.publish(state, version=V0).result(60)
    commit = weights.commit(V0)
    assert commit.tensors["head"].alias_of == "embed"
    assert commit.arrays["float32"].length == 100 * 8 * 2 + 8
    pulled = weights.pull()
    assert pulled["head"] is pulled["embed"]
    assert pulled["copy"] is not pulled["embed"] and torch.equal(pulled["copy"], embedding)
    assert torch.equal(weights.pull(names=["head"])["head"], embedding)


def test_tensors_that_overlap_without_being_the_same_view_are_each_stored(weights):
    base = torch.arange(10.0)
    state = {"all": base, "head": base[:5], "reversed": base.reshape(2, 5).t()}
    weights.publish(state, version=V0).result(60)
    pulled = weights.pull()
    assert all(torch.equal(pulled[name], tensor) for name, tensor in state.items())


def test_views_that_share_a_start_and_a_shape_but_not_their_values_are_no_ties(tmp_path):
    square, complexes = torch.arange(9.0).reshape(3, 3), torch.tensor([1 + 2j, 3 - 1j])
    state = {"square": square, "turned": square.t(), "z": complexes, "conjugate": complexes.conj()}
    weights = WeightStore(str(tmp_path))
    weights.publish(state, version=V0).result(60)
    pulled = weights.pull()
    assert all(torch.equal(pulled[name], tensor) for name, tensor in state.items())


def test_padding_is_zeros_and_no_value_of_the_tensor(place):
    weights = WeightStore(*place)
    weights._versioned.put(V0, pack({"w": torch.ones(5)}, chunk_bytes=8))
    commit = weights.commit(V0)
    array = commit.arrays["float32"]
    assert (array.length, array.chunk) == (5, 2)
    stored = weights.objects.read(f"{layout.data_prefix(V0, commit.attempt)}/float32/c/2")
    assert stored[:8] == np.array([1, 0], dtype="<f4").tobytes()


def test_a_publish_keeps_what_the_tensors_were_when_it_was_called(weights):
    tensor = torch.ones(1000)
    publication = weights.publish({"w": tensor}, version=V0)
    tensor.zero_()
    assert publication.result(60) == V0
    assert publication.done()
    assert torch.equal(weights.pull()["w"], torch.ones(1000))


def test_pull_reads_into_the_tensors_it_is_given(weights):
    state = {"a": torch.randn(4, 3), "b": torch.randn(5), "tied": torch.zeros(0), "empty": torch.zeros(2, 0)}
    state["tied"] = state["b"]
    weights.publish(state, version=V0).result(60)
    out = {
        "a": torch.zeros(3, 4).t(),
        "b": torch.nn.Parameter(torch.zeros(5)),
        "tied": torch.zeros(5),
        "empty": torch.from_numpy(np.zeros((2, 0), dtype=np.float32)),  # of stride 0, which is no expanded one
    }
    pulled = weights.pull(out=out)
    for name, tensor in state.items():
        assert pulled[name] is out[name]
        assert torch.equal(out[name], tensor), name
    assert torch.equal(weights.pull(out={"b": out["b"]})["a"], state["a"])
    only = torch.zeros(5)
    weights.pull(names=["tied"], out={"tied": only})
    assert torch.equal(only, state["b"])
    for wrong in (torch.zeros(3, 4), torch.zeros(4, 3, dtype=torch.float64), torch.zeros(1, 3).expand(4, 3)):
        with pytest.raises(TensorMismatch, match="'a'"):
            weights.pull(out={"a": wrong})
    with pytest.raises(UnknownTensor, match="'c'"):
        weights.pull(out={"c": torch.zeros(1)})
    with pytest.raises(UnknownTensor, match="'c'"):
        weights.pull(names=["a", "c"])


def test_a_few_names_cost_their_own_bytes_and_not_the_whole_array(weights, monkeypatch):
    state = {f"layer{i}": torch.randn(64, 512) for i in range(40)}  # 128 KiB each, 5 MiB together
    weights.publish(state, version=V0).result(60)
    backend = type(weights._versioned.store._backend)
    fetched = []
    read_into = backend.read_into

    def counted(self, path, buffer, start, seen=None):
        fetched.append(len(buffer))
        return read_into(self, path, buffer, start, seen)

    monkeypatch.setattr(backend, "read_into", counted)
    pulled = weights.pull(names=["layer33", "layer3"])
    assert list(pulled) == ["layer33", "layer3"]
    assert all(torch.equal(pulled[name], state[name]) for name in pulled)
    assert sum(fetched) <= 2 * (128 + 2 * 64) * 1024


def test_arrays_of_many_chunks_come_back_and_waste_less_than_a_value_a_chunk(weights, monkeypatch):
    monkeypatch.setattr("storage.weights.pack", partial(pack, chunk_bytes=1000))
    state = {f"t{i}": torch.randn(i * 37 + 1) for i in range(12)} | {"h": torch.randn(777).bfloat16()}
    weights.publish(state, version=V0).result(60)
    commit = weights.commit(V0)
    for array in commit.arrays.values():
        assert len(array.chunks) > 1
        assert len(array.chunks) * array.chunk - array.length < len(array.chunks)
    pulled = weights.pull()
    assert all(same(pulled[name], tensor) for name, tensor in state.items())
    assert same(weights.pull(names=["t9"])["t9"], state["t9"])


def test_plain_zarr_opens_the_arrays_with_equal_values(place, monkeypatch):
    monkeypatch.setattr("storage.weights.pack", partial(pack, chunk_bytes=256))
    weights = WeightStore(*place)
    state = {"w": torch.randn(10, 30), "b": torch.zeros(100), "h": torch.randn(50).bfloat16(), "n": torch.arange(5)}
    state["f"] = torch.randn(9).to(torch.float8_e4m3fn)
    weights.publish(state, version=V0).result(60)
    prefix = layout.data_prefix(V0, weights.commit(V0).attempt)
    group = zarr.open_group(f"{weights.url}/{prefix}", mode="r", storage_options=place[1] or None)
    assert np.array_equal(group["float32"][:], torch.cat([state["w"].reshape(-1), state["b"]]).numpy())
    assert np.array_equal(group["bfloat16"][:], state["h"].view(torch.uint16).numpy())
    assert group["bfloat16"].attrs["dtype"] == "bfloat16"
    assert np.array_equal(group["float8_e4m3fn"][:], state["f"].view(torch.uint8).numpy())
    assert group["int64"][:].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(8).view(torch.float4_e2m1fn_x2)])
def test_a_tensor_that_has_no_plain_form_is_refused_by_name(tmp_path, tensor):
    with pytest.raises(UnsupportedTensor, match=r"'layer\.w'"):
        WeightStore(str(tmp_path)).publish({"layer.w": tensor}, version=V0)


@pytest.mark.parametrize("state", [{"w": [1.0]}, {"w": None}, {1: torch.ones(1)}, {"\ud800w": torch.ones(1)}])
def test_what_is_no_tensor_by_name_is_refused_before_anything_is_written(tmp_path, state):
    with pytest.raises(UnsupportedTensor, match="can't be stored"):
        WeightStore(str(tmp_path)).publish(state, version=V0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, 10**10, 1.5, True, "3"])
def test_a_step_whose_version_could_not_be_found_again_is_refused(tmp_path, step):
    with pytest.raises(ValueError, match="whole numbers"):
        WeightStore(str(tmp_path)).publish({"w": torch.ones(1)}, step=step)
    assert list(tmp_path.iterdir()) == []


def test_the_last_version_there_can_be_is_found_again(weights):
    last = Version(999_999, 9_999_999_999)
    weights.publish({"w": torch.ones(1)}, version=last, background=False)
    assert weights.versions() == [last] and weights.newest() == last and weights.resolve(str(last)) == last


def test_the_commit_says_what_the_version_is_and_where_it_came_from(weights):
    weights.publish({"w": torch.ones(3)}, version=V0).result(60)
    before = time.time()
    said = {"trajectories": ["train/math/3/0/0"], "loss": 0.25, "nested": {"a": [None, True]}}
    weights.publish({"w": torch.ones(3)}, version=Version(0, 1), parent=V0, metadata=said).result(60)
    commit = weights.commit(Version(0, 1))
    assert (commit.format, commit.version, commit.parent, commit.base) == (1, Version(0, 1), V0, None)
    assert commit.metadata == said
    assert before - 1 <= commit.created <= time.time() + 1
    assert commit.bytes == 3 * 4 + 4


def nested(depth):
    found = {}
    for _ in range(depth - 1):
        found = {"x": found}
    return found


@pytest.mark.parametrize("metadata", [{"x": float("nan")}, {"x": object()}, {"x": "\ud800"}, nested(201), nested(250), nested(5000)])
def test_metadata_that_is_not_json_is_refused_at_once(tmp_path, metadata):
    with pytest.raises((TypeError, ValueError)):
        WeightStore(str(tmp_path)).publish({}, version=V0, metadata=metadata)


def test_metadata_as_deep_as_is_taken_is_read(weights):
    weights.publish({}, version=V0, metadata=nested(200), background=False)
    assert weights.commit(V0).metadata == nested(200)


def test_a_commit_that_readers_would_refuse_for_its_size_is_not_written(weights, monkeypatch):
    monkeypatch.setattr("storage.format.commit._LARGEST_COMMIT", 10_000)
    with pytest.raises(ValueError, match="give less metadata"):
        weights.publish({"w": torch.ones(2)}, version=V0, metadata={"x": "y" * 10_000}, background=False)
    assert weights.objects.list() == [] and weights.versions() == []


def test_of_eight_publishers_of_a_version_one_wins_and_the_others_are_told(place):
    stores = [WeightStore(*place) for _ in range(8)]

    def publish(i: int) -> bool:
        try:
            return stores[i].publish({"w": torch.full((1000,), float(i))}, version=V0).result(60) == V0
        except VersionTaken as error:
            assert error.version == V0
            return False

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(publish, range(8)))
    assert won.count(True) == 1
    assert torch.equal(stores[0].pull()["w"], torch.full((1000,), float(won.index(True))))
    folders = {path.split("/")[1] for path in stores[0]._versioned.store.list("data")}
    assert len(folders) == 1, "the losers' data stayed"


def test_a_commit_whose_reply_was_lost_is_still_ours(weights, monkeypatch):
    create = type(weights._versioned.store).create

    def unheard(self, path, data):
        create(self, path, data)
        return create(self, path, data)

    monkeypatch.setattr(type(weights._versioned.store), "create", unheard)
    assert weights.publish({"w": torch.ones(3)}, version=V0).result(60) == V0
    assert torch.equal(weights.pull()["w"], torch.ones(3))


def test_a_publish_in_the_foreground_copies_nothing_and_returns_once_the_version_exists(weights, monkeypatch):
    monkeypatch.setattr("storage.arrays.packing.TensorValues.snapshot", None)
    base = torch.randn(300, 20)
    state = {"plain": base, "turned": base.t(), "tied": base, "half": base[::2].bfloat16()}
    state |= {"conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(), "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag}
    publication = weights.publish(state, step=3, background=False)
    assert publication.done() and publication.result(0) == Version(0, 3)
    pulled = weights.pull()
    assert all(same(pulled[name], tensor) for name, tensor in state.items())
    with pytest.raises(VersionTaken):
        weights.publish(state, step=3, background=False)


def test_a_publish_in_the_foreground_comes_after_those_in_the_background(weights, monkeypatch):
    order = []
    put = VersionedStore.put
    monkeypatch.setattr(
        VersionedStore, "put", lambda self, version, *args, **more: (order.append(version.step), put(self, version, *args, **more))[1]
    )
    behind = [weights.publish({"w": torch.ones(100)}, step=step) for step in range(4)]
    weights.publish({"w": torch.ones(100)}, step=4, background=False)
    assert order == [0, 1, 2, 3, 4]
    assert all(publication.done() for publication in behind)


def test_a_step_is_of_the_newest_lineage(weights):
    assert weights.publish({}, step=5).version == Version(0, 5)
    weights.publish({}, step=6, background=False)
    assert weights.open_lineage(Version(0, 5)) == 1
    assert weights.publish({}, step=6).result(60) == Version(1, 6)
    assert weights.publish({}, version=Version(0, 7)).result(60) == Version(0, 7)
    assert weights.publish({}, step=7).version == Version(1, 7)


@pytest.mark.parametrize("named", [{}, {"step": 0, "version": V0}])
def test_a_version_that_is_named_in_no_way_or_two_is_refused(tmp_path, named):
    with pytest.raises(ValueError, match="give one of them"):
        WeightStore(str(tmp_path)).publish({}, **named)


def test_a_version_before_the_newest_of_its_lineage_is_refused_before_anything_is_written(weights):
    weights.publish({"w": torch.ones(2)}, step=5, background=False)
    before = weights.objects.list()
    with pytest.raises(VersionPassed, match=r"0-4 can't be published .* 0-5") as caught:
        weights.publish({"w": torch.ones(2)}, step=4).result(60)
    assert (caught.value.version, caught.value.newest) == (Version(0, 4), Version(0, 5))
    with pytest.raises(VersionTaken):
        weights.publish({"w": torch.ones(2)}, step=5).result(60)
    assert weights.objects.list() == before
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), VersionPassed)  # noqa: S301


def test_a_publish_that_took_too_long_gives_up_before_its_commit_and_leaves_nothing(weights, monkeypatch):
    now = iter([1000.0, 1001.0, 1000.0 + layout.LONGEST_PUBLISH_S + 1])
    monkeypatch.setattr("storage.versions.time", SimpleNamespace(time=lambda: next(now)))
    with pytest.raises(PublishTooLong, match=r"took 6\.0 hours"):
        weights.publish({"w": torch.ones(2)}, step=0, background=False)
    monkeypatch.undo()
    assert weights.versions() == []
    assert weights.objects.list() == []


def test_what_a_failed_publish_has_written_is_deleted(weights, monkeypatch):
    kind = type(weights.objects)
    write = kind.write

    def full(self, path, data):
        if path.endswith("c/0"):
            raise StoreUnreachable("no space")
        write(self, path, data)

    monkeypatch.setattr(kind, "write", full)
    with pytest.raises(StoreUnreachable, match="no space"):
        weights.publish({"w": torch.ones(2)}, step=0).result(60)
    assert weights.objects.list() == []


def test_files_of_the_model_s_folder_come_back_and_equal_ones_are_stored_once(weights):
    files = {"config.json": b'{"a": 1}', "tokenizer.json": b"tokens", "copy.json": b"tokens"}
    weights.publish({"w": torch.ones(2)}, step=0, files=files, background=False)
    weights.publish({"w": torch.ones(2)}, step=1, files={**files, "config.json": b'{"a": 2}'}, background=False)
    assert {name: weights.file(Version(0, 0), name) for name in files} == files
    assert weights.file(None, "config.json") == b'{"a": 2}'
    stored = weights.objects.list(layout.FILES)
    assert stored == sorted(layout.file_key(hashlib.sha256(data).hexdigest()) for data in (*set(files.values()), b'{"a": 2}'))
    with pytest.raises(UnknownFile, match=r"'vocab\.txt'; it has config\.json, copy\.json"):
        weights.file(None, "vocab.txt")
    for bad in (b"", b'{"a": 3}'):
        weights.objects.write(weights.commit(V0).files["config.json"].key, bad)
        with pytest.raises(Damaged, match="cut short or changed"):
            weights.file(V0, "config.json")
    weights.objects.delete(weights.commit(V0).files["config.json"].key)
    with pytest.raises(Damaged, match="is missing"):
        weights.file(V0, "config.json")


@pytest.mark.parametrize("name", ["../config.json", "a/b.json", "", "/etc/passwd", "x\0"])
def test_a_file_s_name_that_is_not_plain_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(UnsafePath):
        WeightStore(str(tmp_path)).publish({}, step=0, files={name: b""}, background=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_left_and_an_old_one_put_again_before_a_collector_takes_it(weights, monkeypatch):
    written = []
    kind = type(weights.objects)
    write = kind.write
    monkeypatch.setattr(kind, "write", lambda self, path, data: (written.append(path), write(self, path, data))[1])
    weights.publish({}, step=0, files={"config.json": b"{}"}, background=False)
    weights.publish({}, step=1, files={"config.json": b"{}"}, background=False)
    assert sum(path.startswith("files/") for path in written) == 1
    monkeypatch.setattr("storage.model_files._FRESH_S", -60.0)
    weights.publish({}, step=2, files={"config.json": b"{}"}, background=False)
    assert sum(path.startswith("files/") for path in written) == 2


def test_new_tensors_are_made_on_the_device_that_is_asked_for(weights):
    state = {"w": torch.randn(3, 4), "none": torch.zeros(0)}
    weights.publish(state, step=0, background=False)
    assert all(tensor.is_meta for tensor in weights.pull(device="meta").values())
    with pytest.raises(TensorMismatch, match="on meta"):
        weights.pull(out={"w": torch.zeros(3, 4, device="meta")})


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_device_that_is_not_there_and_an_out_that_is_no_tensor_are_refused(weights):
    weights.publish({"w": torch.randn(3)}, step=0, background=False)
    for device in ("cuda:99", "nosuch", 1.5):
        with pytest.raises(DeviceRefused, match=str(device)):
            weights.pull(device=device)
    for how in ({}, {"base": weights.newest()}):
        with pytest.raises(TensorMismatch, match="'w' can't be read into a list"):
            weights.pull(out={"w": [1.0]}, **how)


def test_after_a_fork_every_call_says_so_and_none_hangs(tmp_path):
    weights = WeightStore(str(tmp_path))
    weights.publish({"w": torch.ones(2)}, step=0).result(60)
    gate = threading.Event()
    weights._publisher._pool.submit(gate.wait)
    waiting = weights.publish({"w": torch.ones(2)}, step=1)

    def calls() -> Iterator[Callable[[], object]]:
        yield lambda: weights.publish({"w": torch.ones(2)}, step=2)
        yield lambda: weights.publish({"w": torch.ones(2)}, version=Version(0, 2), background=False)
        yield lambda: waiting.result(5)
        yield weights.pull
        yield weights.newest
        yield lambda: weights.publish_part({}, version=Version(0, 2), attempt="0" * 32, rank=0, ranks=1)
        yield lambda: weights.commit_parts(Version(0, 2), "0" * 32, 1)

    child = os.fork()
    if child == 0:
        told = 0
        try:
            for call in calls():
                try:
                    call()
                except ForkedStore:
                    told += 1
        finally:
            os._exit(told)
    gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert waiting.result(60) == Version(0, 1)


def publish(weights: WeightStore, *versions: Version) -> None:
    for version in versions:
        weights.publish({"w": torch.full((2,), float(version.step))}, version=version).result(60)


def test_an_empty_store_has_no_newest_and_says_so_when_pulled(weights):
    assert weights.newest() is None
    assert weights.versions() == []
    with pytest.raises(VersionMissing, match="any version"):
        weights.pull()
    with pytest.raises(VersionMissing, match="0-7"):
        weights.pull(Version(0, 7))


def test_versions_are_ordered_as_numbers(weights):
    publish(weights, Version(0, 9), Version(0, 10), Version(0, 123456789))
    assert weights.versions() == [Version(0, 9), Version(0, 10), Version(0, 123456789)]
    assert weights.newest() == Version(0, 123456789)
    assert weights.pull(Version(0, 10))["w"].tolist() == [10.0, 10.0]


def test_a_new_lineage_serves_its_branch_point_and_never_the_abandoned_tail(weights):
    assert weights.open_lineage(None) == 0
    assert weights.newest() is None
    publish(weights, Version(0, 1), Version(0, 2), Version(0, 3))
    assert weights.open_lineage(Version(0, 2)) == 1
    assert weights.newest() == Version(0, 2)
    publish(weights, Version(0, 4))  # a trainer of the abandoned tail that has not heard of it yet
    assert weights.newest() == Version(0, 2)
    publish(weights, Version(1, 3))
    assert weights.newest() == Version(1, 3)
    assert weights.newest(0) == Version(0, 4)
    assert weights.open_lineage(Version(1, 3)) == 2
    assert weights.newest() == Version(1, 3)
    assert weights.open_lineage(None) == 3
    assert weights.newest() is None
    assert len(weights.versions()) == 5


def test_a_lineage_needs_a_parent_that_exists(weights):
    publish(weights, Version(0, 1))
    with pytest.raises(VersionMissing, match="0-2"):
        weights.open_lineage(Version(0, 2))
    assert weights.open_lineage(Version(0, 1)) == 1


def test_racing_openers_get_different_lineages(place):
    stores = [WeightStore(*place) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda store: store.open_lineage(None), stores))
    assert sorted(numbers) == [0, 1, 2, 3]


def test_a_weight_store_travels_by_pickle(weights):
    publish(weights, V0)
    again = pickle.loads(pickle.dumps(weights))  # noqa: S301
    assert again.pull()["w"].tolist() == [0.0, 0.0]
    publish(again, Version(0, 1))
    assert weights.newest() == Version(0, 1)


def test_objects_that_are_no_commits_are_not_versions(weights):
    publish(weights, V0)
    for name in ("commits/0-7.json", "commits/readme.txt", "commits/0-00000009.json.bak", "commits/x/0-00000008.json"):
        weights._versioned.store.write(name, b"{}")
    assert weights.versions() == [V0]
