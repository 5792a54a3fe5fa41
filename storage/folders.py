"""Brings a small folder of files (a model's config and tokenizer) to this machine; owns the copy, for as long as the process lives."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.objects import ObjectStore

_COPIES: dict[str, Path] = {}


def local_folder(url: str, storage_options: Mapping[str, Any] | None = None) -> Path:
    """The folder at `url`: itself if it is local, else a copy that is downloaded once a process and removed at its end."""
    store = ObjectStore(url, storage_options)
    if "://" not in store.url:
        return Path(store.url)
    if store.url not in _COPIES:
        target = Path(tempfile.mkdtemp(prefix="rollart-folder-"))
        atexit.register(shutil.rmtree, target, ignore_errors=True)
        for path in store.list():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(store.read(path))
        _COPIES[store.url] = target
    return _COPIES[store.url]


def upload_folder(folder: Path, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Puts every file of a local folder under `url`."""
    store = ObjectStore(url, storage_options)
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        store.write(file.relative_to(folder).as_posix(), file.read_bytes())
