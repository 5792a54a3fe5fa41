"""What a model's location means (a Hugging Face folder, a version of a weight store, a GGUF file), for all that start from one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.errors import FolderRefused
from storage.format.layout import COMMITS
from storage.models import folders, gguf_files
from storage.models.huggingface import CONFIG, export_folder
from storage.models.safetensors_files import is_weights
from storage.objects.store import ObjectStore
from storage.refs import parse_location
from storage.weights import WeightStore


class Model:
    """The model at `location`: `URL@REF` for a version of the weights at URL (`0-42`, a tag, `newest`), `package:NAME` or the path or URL
    of a `.gguf` for that file, else a folder or its URL.

    Nothing is read until it is asked for; whatever is wrong then is a StoreError. A local folder whose name has an `@`, or ends in
    `.gguf`, is that folder. `gguf` is the name of the one file that a GGUF model is; such a model has no other.
    """

    def __init__(self, location: str, storage_options: Mapping[str, Any] | None = None) -> None:
        folder = (Path(location) / CONFIG).is_file()
        file = None if folder else gguf_files.located(location)
        self.gguf: str | None = None
        if file is not None:
            location, _, self.gguf = file.rpartition("/")
            location = location or ("/" if file.startswith("/") else ".")
        url, ref = (location, None) if folder or file is not None else parse_location(location)
        self._options = dict(storage_options or {})
        self._weights = WeightStore(url, self._options) if ref is not None else None
        self._ref = ref
        self._folder = self._weights.objects if self._weights is not None else ObjectStore(url, self._options)
        self._local = "://" not in self._folder.url

    def __str__(self) -> str:
        if self.gguf is not None:
            return f"{self._folder.url}/{self.gguf}"
        return self._folder.url if self._ref is None else f"{self._folder.url}@{self._ref}"

    def names(self) -> set[str]:
        """Names of its config and tokenizer files, none for a GGUF model. FolderRefused, VersionMissing, UnknownTag."""
        if self._weights is not None:
            return set(self._weights.commit(self._weights.resolve(self._ref)).files)
        found = folders.present(Path(self._folder.url)) if self._local else self._folder.list()
        if self.gguf is not None:
            if self.gguf not in found:
                raise FolderRefused(f"there is no file {self}: give the path of a GGUF model")
            return set()
        if CONFIG not in found and any(name.startswith(COMMITS + "/") for name in self._folder.list(COMMITS)):
            raise FolderRefused(f"{self._folder.url} holds versions of weights: say which one is meant, such as {self._folder.url}@newest")
        return {name for name in found if folders.is_model_file(name)}

    def file(self, name: str) -> bytes:
        """One of these files."""
        if self._weights is not None:
            return self._weights.file(self._weights.resolve(self._ref), name)
        return (Path(self._folder.url) / name).read_bytes() if self._local else self._folder.read(name)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """All of it, weights too if it has any, as a local folder that transformers loads (with `gguf_file=` for a GGUF model); a copy
        is removed at the end."""
        if self._weights is None:
            with folders.fetched(self._folder.url, self._options, self._is_part) as path:
                yield path
            return
        with tempfile.TemporaryDirectory(prefix="rollart-model-") as scratch:
            export_folder(self._weights, self._weights.resolve(self._ref), ObjectStore(scratch))
            yield Path(scratch)

    def _is_part(self, name: str) -> bool:
        if self.gguf is not None:
            return name == self.gguf
        return is_weights(name) or folders.is_model_file(name)
