"""One download a host, straight into the file that engines load, and no folder that outlives its users."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollart.engines.weight_cache import SHARED_MEMORY, WeightCache, shared_memory
from storage.errors import StoreUnreachable, UnsupportedTensor, VersionMissing
from storage.version import Version
from storage.weights import WeightStore
from tests.engines.host_process import context, fetching, serving
from tests.storage.histories import data_paths


class CountingStore(WeightStore):
    """A real store that counts its downloads."""

    pulls = 0

    def pull(self, *args, **kwargs):
        self.pulls += 1
        return super().pull(*args, **kwargs)


@pytest.fixture
def store(tmp_path):
    weights = CountingStore(str(tmp_path / "store"))
    for step in range(3):
        tied = torch.full((4, 3), float(step))
        weights.publish({"a": tied, "b": torch.arange(5.0), "c": tied}, version=Version(0, step)).result()
    return weights


def folders(cache):
    return sorted(p.name for p in cache.folder.glob("v*") if p.is_dir())


def test_two_engines_of_a_host_download_once_and_share_the_folder(store, tmp_path):
    first, second = WeightCache(store, tmp_path), WeightCache(store, tmp_path)
    path = first.fetch(Version(0, 1))
    assert second.fetch(Version(0, 1)) == path == first.fetch(Version(0, 1))
    assert store.pulls == 1
    loaded = load_file(path / "model.safetensors")
    assert torch.equal(loaded["b"], torch.arange(5.0))
    assert all((loaded[n] == 1).all() for n in {"a", "c"} & set(loaded))
    first.close()
    second.close()


def test_an_older_version_goes_once_nobody_holds_it(store, tmp_path):
    first, second = WeightCache(store, tmp_path), WeightCache(store, tmp_path)
    first.fetch(Version(0, 0))
    second.fetch(Version(0, 0))
    first.fetch(Version(0, 1))
    assert folders(first) == ["v0-0", "v0-1"]
    second.fetch(Version(0, 2))
    assert folders(first) == ["v0-1", "v0-2"]
    first.close()
    assert folders(second) == ["v0-2"]
    second.close()
    assert not second.folder.exists()


def test_a_missing_version_leaves_the_held_one(store, tmp_path):
    cache = WeightCache(store, tmp_path)
    held = cache.fetch(Version(0, 0))
    with pytest.raises(VersionMissing):
        cache.fetch(Version(0, 9))
    assert (held / "model.safetensors").exists()
    cache.close()


def test_what_a_killed_process_left_goes_when_another_store_is_opened(store, tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from rollart.engines.weight_cache import WeightCache
from storage.version import Version
from storage.weights import WeightStore
cache = WeightCache(WeightStore({store.url!r}), Path({str(tmp_path)!r}))
cache.fetch(Version(0, 0))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("rollart-weights-*")
    assert (left / "v0-0" / "model.safetensors").exists()
    other = WeightCache(WeightStore(str(tmp_path / "other")), tmp_path)
    assert not left.exists()
    other.close()
    assert os.listdir(tmp_path) == ["store"]


# ---- the file


def fetched(state: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    weights = WeightStore(str(tmp_path / "any"))
    weights.publish(state, version=Version(0, 0)).result()
    return WeightCache(weights, tmp_path).fetch(Version(0, 0)) / "model.safetensors"


def test_the_file_holds_every_type_bit_for_bit_ties_once_and_aligned(tmp_path):
    tied = torch.randn(7, 3).bfloat16()
    state = {
        "byte": torch.arange(5, dtype=torch.uint8),
        "z.head": tied,
        "float": torch.randn(3, 5),
        "a.embedding": tied,
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4, dtype=torch.float16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "strided": torch.randn(6, 4).t(),
    }
    path = fetched(state, tmp_path)
    found = load_file(path)
    assert set(found) == set(state) - {"a.embedding"}, "tied ones are there under the name that came first"
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape)
        assert torch.equal(tensor.contiguous().view(-1).view(torch.uint8), state[name].contiguous().view(-1).view(torch.uint8))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % state[name].element_size() == 0


@pytest.mark.parametrize("kind", ["llama", "llama_untied", "gemma3"])
def test_transformers_opens_the_file_as_the_model_that_was_published(tiny, tmp_path, kind):
    model = tiny.model(kind, seed=3)
    folder = fetched(model.state_dict(), tmp_path).parent
    model.config.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert {n: p.data_ptr() for n, p in loaded.named_parameters()}.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_type_that_the_file_has_no_place_for_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedTensor, match="'odd' of complex128"):
        fetched({"odd": torch.randn(3, dtype=torch.complex128)}, tmp_path)


def test_no_room_is_an_error_that_names_the_file_and_leaves_the_held_version(store, tmp_path, monkeypatch):
    cache = WeightCache(store, tmp_path)
    held = cache.fetch(Version(0, 0))

    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"no room for a version of \d+ bytes") as refused:
        cache.fetch(Version(0, 1))
    assert refused.value.errno == errno.ENOSPC and str(cache.folder) in str(refused.value)
    assert (held / "model.safetensors").exists()
    assert not list(cache.folder.glob("*/.aside*"))
    cache.close()


def test_what_a_process_killed_in_a_download_left_is_no_version_and_goes_with_the_next_fetch(store, tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from rollart.engines.weight_cache import WeightCache
from storage.version import Version
from storage.weights import WeightStore
class Dying(WeightStore):
    def pull(self, *args, **kwargs):
        super().pull(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
WeightCache(Dying({store.url!r}), Path({str(tmp_path)!r})).fetch(Version(0, 1))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -signal.SIGKILL
    cache = WeightCache(store, tmp_path)
    (left,) = (cache.folder / "v0-1").iterdir()
    assert left.name.startswith(".aside-")
    folder = cache.fetch(Version(0, 1))
    assert [p.name for p in folder.iterdir()] == ["model.safetensors"]
    assert (load_file(folder / "model.safetensors")["a"] == 1).all()
    cache.close()


# ---- changes


@pytest.fixture
def changing(tmp_path) -> tuple[WeightStore, list[dict[str, torch.Tensor]]]:
    """Versions 0-0, whole, to 0-3, each changes of the one before; and their states."""
    weights = WeightStore(str(tmp_path / "changing"), full_every=10)
    generator = torch.Generator().manual_seed(0)
    tied = torch.randn(300, 100, generator=generator).bfloat16()
    states = [{"a": tied, "b": torch.randn(50, generator=generator), "c": tied, "none": torch.empty(0)}]
    for _ in range(3):
        tied = states[-1]["a"].clone()
        tied.view(-1)[torch.randint(tied.numel(), (30,), generator=generator)] += 1
        states.append({"a": tied, "b": states[-1]["b"], "c": tied, "none": torch.empty(0)})
    for step, state in enumerate(states):
        weights.publish(state, version=Version(0, step)).result()
    assert [weights.commit(Version(0, step)).base for step in range(4)] == [None, *(Version(0, step) for step in range(3))]
    return weights, states


def holds(folder: Path, state: dict[str, torch.Tensor]) -> bool:
    found = load_file(folder / "model.safetensors")
    return set(found) == {"a", "b", "none"} and all(torch.equal(found[name], state[name]) for name in found)


def test_only_the_changes_since_a_version_that_the_host_has_are_downloaded(changing, tmp_path):
    weights, states = changing
    cache = WeightCache(weights, tmp_path, token="t")
    assert holds(cache.fetch(Version(0, 0)), states[0])
    whole = cache.stats.store
    assert holds(cache.fetch(Version(0, 1)), states[1])
    one = cache.stats.store - whole
    assert 0 < one == weights.bytes_to_pull(Version(0, 1), Version(0, 0)) < whole / 20
    assert holds(cache.fetch(Version(0, 3)), states[3])
    assert cache.stats.store - whole - one == weights.bytes_to_pull(Version(0, 3), Version(0, 1)) < whole / 10
    cache.close()


def test_a_host_that_has_none_of_a_versions_bases_downloads_the_chain(changing, tmp_path):
    weights, states = changing
    cache = WeightCache(weights, tmp_path)
    assert holds(cache.fetch(Version(0, 3)), states[3])
    cache.close()


def test_a_copy_that_was_changed_on_this_host_is_not_built_upon(changing, tmp_path, caplog):
    weights, states = changing
    cache = WeightCache(weights, tmp_path)
    path = cache.fetch(Version(0, 0)) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-40] ^= 1
    path.write_bytes(raw)
    assert holds(cache.fetch(Version(0, 1)), states[1])
    assert "read whole" in caplog.text
    cache.close()


# ---- many processes, many hosts


def test_sixteen_engine_processes_of_a_host_download_one_copy(store, tmp_path):
    starting, parent = context(), tmp_path / "host"
    gate, results = starting.Barrier(16), starting.Queue()
    processes = [starting.Process(target=fetching, args=(store.url, str(parent), Version(0, 2), gate, results)) for _ in range(16)]
    for process in processes:
        process.start()
    found = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    assert sorted(read for read, _ in found) == [0] * 15 + [store.bytes_to_pull(Version(0, 2))]
    assert {value for _, value in found} == {2.0}
    assert os.listdir(parent) == [], "nothing stays"


def test_hosts_read_a_version_from_each_other_and_say_so_once(store, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    caches = [WeightCache(store, tmp_path / name, token="t") for name in ("one", "two")]
    urls = [cache.chunk_server() for cache in caches]
    size = store.bytes_to_pull(Version(0, 1))
    for cache in caches:
        assert (load_file(cache.fetch(Version(0, 1), urls) / "model.safetensors")["a"] == 1).all()
        cache.fetch(Version(0, 1), urls)
    stats = [cache.stats for cache in caches]
    assert sum(one.store for one in stats) == size
    assert sum(one.served for one in stats) == 2 * size
    assert [sum(one.peers.values()) for one in stats] == [size, size]
    said = [re.fullmatch(r"version 0-1 came to this host: (\d+) bytes from the store, (\d+) from peers", r.getMessage()) for r in caplog.records]
    assert [int(found[2]) for found in said if found] == [size, size]
    for cache in caches:
        cache.close()


def test_a_host_keeps_the_last_two_versions_for_the_others(store, tmp_path):
    caches = [WeightCache(store, tmp_path / name, token="t") for name in ("one", "two")]
    urls = [cache.chunk_server() for cache in caches]
    for step in range(3):
        for cache in caches:
            cache.fetch(Version(0, step), urls)
    kept = sum(cache._chunks._server.cache.kept_bytes for cache in caches)
    assert kept == sum(store.bytes_to_pull(Version(0, step)) for step in (1, 2))
    for cache in caches:
        cache.close()


def test_a_process_that_serves_what_another_one_downloads_keeps_no_more_for_it(store, tmp_path):
    serving_one, downloading = (WeightCache(store, tmp_path / "host", token="t") for _ in range(2))
    serving_one.chunk_server()
    served = serving_one._chunks._server.cache
    for step in range(3):
        downloading.fetch(Version(0, step))
        serving_one.fetch(Version(0, step))
        for path in data_paths(store, step):  # other hosts ask for all of it
            served.get(path, 30)
    assert served.kept_bytes == sum(store.bytes_to_pull(Version(0, step)) for step in (1, 2))
    for cache in (serving_one, downloading):
        cache.close()


def test_the_first_process_of_a_host_serves_for_all_and_another_takes_over_after_it(store, tmp_path):
    first, second = (WeightCache(store, tmp_path / "host", token="t") for _ in range(2))
    url = first.chunk_server()
    assert second.chunk_server() == url == first.chunk_server()
    assert WeightCache(store, tmp_path / "host").chunk_server() is None
    other_run = WeightCache(store, tmp_path / "host", token="u")
    assert other_run.chunk_server() != url
    other_run.close()
    first.close()
    taken = second.chunk_server()
    assert taken != url
    socket.create_connection(("127.0.0.1", urlsplit(taken).port), 5).close()
    second.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(taken).port), 5)


def test_a_killed_processs_server_is_replaced(store, tmp_path):
    results = context().Queue()
    process = context().Process(target=serving, args=(store.url, str(tmp_path / "host"), results))
    process.start()
    url = results.get(timeout=60)
    cache = WeightCache(store, tmp_path / "host", token="t")
    assert cache.chunk_server() == url
    process.kill()
    process.join(60)
    assert cache.chunk_server() != url
    cache.close()
    assert os.listdir(tmp_path / "host") == []


def test_a_version_is_leased_while_it_is_read(store, tmp_path):
    held: list[str] = []

    class Looking(WeightStore):
        def pull(self, *args, **kwargs):
            held.extend(self.objects.list("leases"))
            return super().pull(*args, **kwargs)

    cache = WeightCache(Looking(store.url), tmp_path)
    cache.fetch(Version(0, 1))
    assert len(held) == 1 and "/0-1-" in held[0]
    assert store.objects.list("leases") == []
    cache.close()


def test_a_store_that_may_only_be_read_is_read_without_a_lease(store, tmp_path):
    class ReadOnly(WeightStore):
        def lease(self, *args, **kwargs):
            raise StoreUnreachable("this host may not write here")

    cache = WeightCache(ReadOnly(store.url), tmp_path)
    assert (cache.fetch(Version(0, 1)) / "model.safetensors").exists()
    cache.close()


def test_the_environment_says_what_counts_as_one_host(store, tmp_path, monkeypatch):
    monkeypatch.setenv(SHARED_MEMORY, str(tmp_path / "mine"))
    assert shared_memory() == tmp_path / "mine"
    cache = WeightCache(store)
    assert cache.folder.parent == tmp_path / "mine"
    cache.close()
