"""The weights of a draft on one worker: those that its engine starts with, and the newer ones that it is given. Talks to no engine."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollart.engines.errors import EngineDied
from rollart.engines.speculative.settings import SpeculationSettings
from rollart.engines.weight_cache import WeightCache
from storage.models.model import Model
from storage.version import Version
from storage.weights import WeightStore

__all__ = ["FOLLOW_S", "DraftVersions"]

log = logging.getLogger(__name__)

FOLLOW_S = 5.0
"""Seconds between two looks for a newer version: a draft that is so much older than it could be costs next to nothing."""


class DraftVersions:
    """Where `settings` say that a draft's weights are: in a folder, or in a store of versions, which all workers of a host download once.

    A version's files (the config of a head or a model) belong to it. Methods block, but for `follow`: call them in a thread.
    """

    def __init__(self, settings: SpeculationSettings, storage_options: Mapping[str, Any]) -> None:
        self._settings = settings
        self._options = dict(storage_options)
        self._store = None if settings.versions is None else WeightStore(settings.versions, self._options)
        self._cache = None if self._store is None else WeightCache(self._store)
        self.version: Version | None = None
        self._laid: Version | None = None

    @property
    def follows(self) -> bool:
        """Whether newer versions are wanted."""
        return self._settings.follow

    def close(self) -> None:
        """Lets go of what this host has."""
        if self._cache is not None:
            self._cache.close()

    @contextlib.contextmanager
    def start(self, again: bool = False) -> Iterator[tuple[Path, str] | None]:
        """The folder to start an engine with, while it starts, and the version in it: the newest of the store, or the one from before if newer
        ones aren't wanted, or `again` says so; else the folder in the settings; None if there is no version yet, which a draft of kind head may
        wait for. The version becomes the present one once the engine has started.

        EngineDied if a draft of kind model has to wait for a version; what the store raises, StoreError for a folder that isn't there.
        """
        version = self.version
        if self._store is not None and (version is None or (self.follows and not again)):
            version = self._store.newest()
        if version is not None:
            yield self.folder(version), str(version)
            self.version = version
        elif self._settings.model is not None:
            source = Model(str(self._settings.model), self._options)
            source.names()  # raises where there is no such folder
            with source.folder() as folder:
                yield folder, self._settings.version
        elif self._settings.draft == "head":
            log.warning("%s holds no draft head yet: nothing is drafted%s", self._settings.versions, " until it does" if self.follows else "")
            yield None
        else:
            raise EngineDied(
                f"engine.speculation.versions: {self._settings.versions} holds no version yet; publish one, or name a model to start with"
            )

    def folder(self, version: Version) -> Path:
        """The folder of a version, with its weights and its files; it stays, without the store, until another one is asked for."""
        if self._store is None or self._cache is None:
            raise EngineDied("this draft has no versions; only its folder was named")
        folder = self._cache.folder / f"draft-{os.getpid()}-{id(self):x}"
        if self._laid == version:
            return folder
        self._laid = None
        weights = self._cache.fetch(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in self._store.commit(version).files:
            (folder / name).write_bytes(self._store.file(version, name))
        for file in weights.glob("*.safetensors"):
            (folder / file.name).symlink_to(file)
        self._laid = version
        return folder

    async def follow(self) -> AsyncIterator[Version]:
        """Versions newer than the present one as they appear, of several the newest. StoreUnreachable once the store has been away for long."""
        if self._store is None:
            return
        async for version in self._store.follow_async(after=self.version, window=0, poll_s=FOLLOW_S):
            if version != self.version:
                yield version
