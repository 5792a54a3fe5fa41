"""Brings a folder of files (a model's config, tokenizer and weights) to this machine and back; owns the copies, not what they mean."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import FolderRefused
from storage.objects import paths
from storage.objects.store import ObjectStore

PIECE_BYTES = 64 << 20
"""What of a file is in memory at once while it is downloaded."""

_LARGEST_FILE = 256 << 20
_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|"
    r"(tokenizer|spiece|sentencepiece\.bpe)\.model|[A-Za-z0-9_-]{1,64}\.(tiktoken|jinja)|chat_template\.json|(pre)?processor_config\.json"
)

_COPIES: dict[str, Path] = {}


def is_model_file(name: str) -> bool:
    """Whether a file of this name, at the top of a model's folder, belongs to its config or tokenizer; never code, never weights."""
    return _FILES.fullmatch(name) is not None


def model_files(folder: Path) -> dict[str, bytes]:
    """Config and tokenizer files of a local folder, by name. FolderRefused for one that leads out of it, or is too large."""
    return {name: _content(folder, name) for name in present(folder) if is_model_file(name)}


def present(folder: Path) -> list[str]:
    """Names of the files at the top of a local folder. FolderRefused if there is no such folder, or a model's file leads out of it."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise FolderRefused(f"{folder} can't be listed as a folder ({error.strerror}): give a model's folder") from error
    return [entry.name for entry in entries if entry.is_file() and _stays(folder, entry)]


def _stays(folder: Path, file: Path) -> bool:
    """True; FolderRefused if a link leads elsewhere than into the folder, or into the blobs of the Hugging Face cache that it is in."""
    if not file.is_symlink():
        return True
    real, home = file.resolve(), folder.resolve()
    if real.is_relative_to(home) or (home.parent.name == "snapshots" and real.is_relative_to(home.parent.parent / "blobs")):
        return True
    raise FolderRefused(f"{file} is a link out of its folder: put the file itself there")


def _content(folder: Path, name: str) -> bytes:
    size = (folder / name).stat().st_size
    if size > _LARGEST_FILE:
        raise FolderRefused(f"{folder / name} has {size} bytes, more than any config or tokenizer")
    return (folder / name).read_bytes()


def local_folder(url: str, storage_options: Mapping[str, Any] | None = None) -> Path:
    """The folder at `url`: itself if it is local, else a copy that is downloaded once a process and removed at its end."""
    store = ObjectStore(url, storage_options)
    if "://" not in store.url:
        return Path(store.url)
    if store.url not in _COPIES:
        target = Path(tempfile.mkdtemp(prefix="rollart-folder-"))
        atexit.register(shutil.rmtree, target, ignore_errors=True)
        download(store, target)
        _COPIES[store.url] = target
    return _COPIES[store.url]


@contextmanager
def fetched(url: str, storage_options: Mapping[str, Any] | None, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """The folder at `url` itself if it is local; else a temporary copy of those of its files, at its top, that are `wanted`."""
    store = ObjectStore(url, storage_options)
    if "://" not in store.url:
        yield Path(store.url)
        return
    with tempfile.TemporaryDirectory(prefix="rollart-folder-") as scratch:
        download(store, Path(scratch), wanted)
        yield Path(scratch)


def download(store: ObjectStore, target: Path, wanted: Callable[[str], bool] | None = None) -> None:
    """Copies the objects of `store` into the local folder `target`: all of them, or those at its top that are `wanted`.

    UnsafePath for an object whose name would lead out of it.
    """
    for info in store.infos():
        if wanted is not None and not wanted(info.path):
            continue
        file = target / paths.checked(info.path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb") as out:
            for start in range(0, info.bytes, PIECE_BYTES):
                piece = np.empty(min(PIECE_BYTES, info.bytes - start), dtype=np.uint8)
                if store.read_into(info.path, piece, start) < start + len(piece):
                    raise FolderRefused(f"{store.url}/{info.path} became shorter while it was read: try again once nobody writes there")
                out.write(piece.data)


def upload_folder(folder: Path, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Puts every file of a local folder under `url`, mapped from the disk rather than read whole."""
    store = ObjectStore(url, storage_options)
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = np.memmap(file, dtype=np.uint8, mode="r") if file.stat().st_size else b""
        store.write(file.relative_to(folder).as_posix(), data)
