"""One download a host, and no folder that outlives its users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from rollart.engines.weight_cache import WeightCache
from storage.errors import VersionMissing
from storage.version import Version
from storage.weights import WeightStore


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
