"""Ways to get a state onto a disk or a bucket and back, all as safe: what is compared in `weights`. Measures nothing."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load, save, save_file

from storage.version import Version
from storage.weights import WeightStore

__all__ = ["BUCKET_WAYS", "LOCAL_WAYS", "Checkpointed", "Pickled", "Opener", "SafetensorsFile", "SafetensorsObject", "Way", "ZarrVersions"]

State = Mapping[str, torch.Tensor]


class Way(Protocol):
    """`publish` returns once the state is safe (on the disk, or acknowledged by the server); `pull` fills the tensors of `out`."""

    def publish(self, state: State) -> None: ...
    def pull(self, out: State) -> None: ...
    def clear(self) -> None: ...


class ZarrVersions:
    """This project's versions, checksums written and verified."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.store = WeightStore(url, options, durable=True)
        self._step = -1

    def publish(self, state: State) -> None:
        self._step += 1
        self.store.publish(state, version=Version(0, self._step), background=False)

    def pull(self, out: State) -> None:
        self.store.pull(Version(0, self._step), out=out)

    def clear(self) -> None:
        _remove(self.store.url)


class SafetensorsFile:
    """One safetensors file in a folder, written aside, synced, renamed."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._file = Path(url) / "model.safetensors"

    def publish(self, state: State) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        aside = self._file.with_suffix(".aside")
        save_file(dict(state), aside)
        _into_place(aside, self._file)

    def pull(self, out: State) -> None:
        with safe_open(self._file, framework="pt") as file:
            for name, tensor in out.items():
                tensor.copy_(file.get_tensor(name))

    def clear(self) -> None:
        _remove(str(self._file.parent))


class Pickled:
    """`torch.save` to a file, written aside, synced, renamed."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._file = Path(url) / "model.pt"

    def publish(self, state: State) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        aside = self._file.with_suffix(".aside")
        torch.save(dict(state), aside)
        _into_place(aside, self._file)

    def pull(self, out: State) -> None:
        loaded = torch.load(self._file, weights_only=True)
        for name, tensor in out.items():
            tensor.copy_(loaded[name])

    def clear(self) -> None:
        _remove(str(self._file.parent))


class Checkpointed:
    """`torch.distributed.checkpoint` in one process, its files synced."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._folder = Path(url)

    def publish(self, state: State) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says at each call that there is one process, as is meant
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(self._folder, sync_files=True), no_dist=True)

    def pull(self, out: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(dict(out), storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)

    def clear(self) -> None:
        _remove(str(self._folder))


class SafetensorsObject:
    """One safetensors object, uploaded and downloaded whole by the same client as the versions."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._fs, self._path = fsspec.core.url_to_fs(f"{url}/model.safetensors", **options)

    def publish(self, state: State) -> None:
        self._fs.pipe_file(self._path, save(dict(state)))

    def pull(self, out: State) -> None:
        loaded = load(self._fs.cat_file(self._path))
        for name, tensor in out.items():
            tensor.copy_(loaded[name])

    def clear(self) -> None:
        self._fs.rm(self._path)


class PickledObject:
    """What `torch.save` writes as one object, by the same client."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._fs, self._path = fsspec.core.url_to_fs(f"{url}/model.pt", **options)

    def publish(self, state: State) -> None:
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        self._fs.pipe_file(self._path, buffer.getvalue())

    def pull(self, out: State) -> None:
        loaded = torch.load(io.BytesIO(self._fs.cat_file(self._path)), weights_only=True)
        for name, tensor in out.items():
            tensor.copy_(loaded[name])

    def clear(self) -> None:
        self._fs.rm(self._path)


Opener = Callable[[str, dict[str, Any]], Way]
"""Opens a way at a URL with storage options."""

LOCAL_WAYS: dict[str, Opener] = {"versions": ZarrVersions, "safetensors": SafetensorsFile, "torch.save": Pickled, "DCP": Checkpointed}
BUCKET_WAYS: dict[str, Opener] = {"versions": ZarrVersions, "safetensors": SafetensorsObject, "torch.save": PickledObject}


def _into_place(aside: Path, target: Path) -> None:
    """Syncs the file and the folder's list of names, as the versions do with `durable`."""
    with open(aside, "rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(url: str) -> None:
    if "://" not in url:
        shutil.rmtree(url, ignore_errors=True)
