"""What a generation worker owns: one engine process, and the versions it is told to serve. Chooses no version and routes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from distributed import Worker, WorkerPlugin
from distributed.comm import get_address_host

from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineDied, EngineError, EngineRefused, EngineUnreachable
from rollart.engines.process import EngineProcess
from rollart.engines.router import EngineEntry
from rollart.engines.settings import EngineLaunch, EngineSettings
from rollart.engines.speculative.settings import WEIGHTED
from rollart.engines.updating import give_weights
from rollart.fence import admit
from storage.errors import StoreError
from storage.version import Version

if TYPE_CHECKING:
    from rollart.engines.draft_versions import DraftVersions
    from rollart.engines.weight_cache import WeightCache

__all__ = ["PLUGIN", "EngineHost", "EngineSettings", "chunk_server_task", "serve_task"]

log = logging.getLogger(__name__)

PLUGIN = "engine"
"""The plugin's name: tasks reach it as `get_worker().plugins[PLUGIN]`."""


class EngineHost(WorkerPlugin):
    """Starts an engine on every worker that has one of `hardware_classes` as a Dask resource, and on no other.

    The engine starts in `setup`, so a worker (also a late or restarted one) has it before its first task, and dies with
    the worker however that ends. It has random weights, and serves no request, until `serve` was called once.
    Hosts that were given each other's `chunk_server` read versions from each other: all workers have this plugin's token.
    It serves what `coordinator` tells it to, and nobody else.
    """

    name = PLUGIN

    def __init__(
        self,
        settings: EngineLaunch,
        weights_url: str,
        storage_options: Mapping[str, Any] | None = None,
        hardware_classes: Sequence[str] = ("generate",),
        coordinator: int = 0,
    ) -> None:
        self.settings = settings
        self.weights_url = weights_url
        self.storage_options = dict(storage_options or {})
        self.hardware_classes = tuple(hardware_classes)
        self.coordinator = coordinator
        self.hardware_class: str | None = None
        self.restarts = 0
        self._token = secrets.token_urlsafe(32)
        self._model = Path()
        self._process: EngineProcess | None = None
        self._cache: WeightCache | None = None
        self._drafts: DraftVersions | None = None
        self._following: asyncio.Task[None] | None = None
        self._client: EngineClient | None = None
        self._serving: asyncio.Lock | None = None
        self._address = "127.0.0.1"

    async def setup(self, worker: Worker) -> None:
        """Starts the engine; EngineDied if it does not come up."""
        self.hardware_class = next((c for c in self.hardware_classes if c in worker.state.total_resources), None)
        if self.hardware_class is None:
            return
        if not worker.address.startswith("inproc://"):
            self._address = get_address_host(worker.address)
        self._serving = asyncio.Lock()
        self._client = EngineClient()
        alone = self.settings.takes_adapters
        self._cache = await asyncio.to_thread(_open_cache, self.weights_url, self.storage_options, self._token, self._address, alone)
        try:
            if self.settings.speculation.draft in WEIGHTED:
                self._drafts = await asyncio.to_thread(_open_drafts, self.settings)
            await self._start()
        except BaseException:
            await self.teardown(worker)
            raise
        if self._drafts is not None and self._drafts.follows:
            self._following = asyncio.create_task(self._follow(self._drafts), name="follow-drafts")

    async def teardown(self, worker: Worker) -> None:
        """Ends the engine and removes this host's folders, unless another engine of the host uses them."""
        process, cache, client, drafts, following = self._process, self._cache, self._client, self._drafts, self._following
        self._process = self._cache = self._client = self._drafts = self._following = None
        if following is not None:
            following.cancel()
        # The folders first: they alone outlive this process, which a nanny in a hurry may kill in the middle of this.
        if cache is not None:
            await asyncio.to_thread(cache.close)
        if drafts is not None:
            await asyncio.to_thread(drafts.close)
        if process is not None:
            await process.end()
        if client is not None:
            await client.close()

    @property
    def url(self) -> str:
        """Where the engine listens; EngineDied if it does not run."""
        return self._running().url

    @property
    def pid(self) -> int:
        """The engine's process id; EngineDied if it does not run."""
        return self._running().pid

    async def chunk_server(self) -> str | None:
        """The URL at which this host serves chunks to the others; one worker of the host runs it for all. EngineDied if closing."""
        if self._cache is None:
            raise EngineDied(f"this worker owns no engine: it has none of the resources {', '.join(self.hardware_classes)}, or is closing")
        return await asyncio.to_thread(self._cache.chunk_server)

    async def serve(self, version: Version, peers: Sequence[str] = (), coordinator: int = 0) -> EngineEntry:
        """Has the engine serve `version` and returns its entry for the table, once the engine itself has named that version.

        Downloads the version once a host, from `peers` (the chunk servers of all hosts) first and from the store last, while the
        engine decodes on. An engine that has died is started again first.
        Raises what the store raises (VersionMissing among it), EngineRefused if the engine rejects the weights or still names
        another version, and EngineDied if it ends meanwhile. Calls are served one after the other.
        Superseded, and nothing is served, if another coordinator asks than the one that this host is of.
        """
        admit(coordinator, self.coordinator)
        if self._serving is None or self._cache is None or self._client is None:
            raise EngineDied(f"this worker owns no engine: it has none of the resources {', '.join(self.hardware_classes)}, or is closing")
        async with self._serving:
            if self._process is None or not self._process.alive:
                await self._restart()
            process = self._running()
            try:
                if await self._client.model_version(process.url) != str(version):
                    folder = await asyncio.to_thread(self._cache.fetch, version, peers)
                    await give_weights(self._client, self.settings, self._model, process.url, folder, str(version))
                served = await self._client.model_version(process.url)
                load = await self._client.load(process.url)
            except EngineUnreachable as error:
                if process.alive:
                    raise  # not `from error`: an exception that is its own cause has Dask look for the first cause for ever
                raise process.died() from error
            if served != str(version):
                raise EngineRefused(process.url, 200, f"it was given version {version} and says that it serves {served}")
            return EngineEntry(process.url, str(self.hardware_class), version, load.running + load.waiting)

    def _running(self) -> EngineProcess:
        if self._process is None:
            raise EngineDied("this worker runs no engine; call serve to start it")
        if not self._process.alive:
            raise self._process.died()
        return self._process

    async def _start(self) -> None:
        """Starts the engine; with the draft from before where it doesn't come up with the newest, or the store of drafts is away."""
        drafts = self._drafts
        try:
            await self._start_with_draft()
        except (StoreError, EngineDied) as error:
            if drafts is None or not drafts.follows or drafts.version is None:
                raise
            log.warning("the engine doesn't start with the newest draft, and is started with version %s again: %s", drafts.version, error)
            await self._start_with_draft(again=True)

    async def _start_with_draft(self, again: bool = False) -> None:
        folder = self._model = await asyncio.to_thread(self._model_folder)
        settings = self.settings
        with contextlib.ExitStack() as stack:
            if self._drafts is not None:
                start = await asyncio.to_thread(stack.enter_context, self._drafts.start(again))
                settings = settings if start is None else settings.drafting_from(*start)
            self._process = await EngineProcess.start(settings.command(folder, self._address), settings.environment, settings.start_seconds)

    async def _follow(self, drafts: DraftVersions) -> None:
        """Gives the engine newer versions of its draft as they appear, between the policy's. One that doesn't come, or doesn't fit, is told of and
        left out: drafts cost or save time, and change nothing else."""
        try:
            async for version in drafts.follow():
                await self._give(drafts, version)
        except StoreError as error:
            log.error("drafts are no longer followed, and stay at version %s: %s", drafts.version, error)

    async def _give(self, drafts: DraftVersions, version: Version) -> None:
        if self._serving is None or self._client is None:
            return
        async with self._serving:
            if self._process is None or not self._process.alive:
                return  # it starts again with the newest
            try:
                folder = await asyncio.to_thread(drafts.folder, version)
                await give_weights(self._client, self.settings, self._model, self._process.url, folder, str(version), "draft")
            except (StoreError, EngineError, OSError) as error:
                log.warning("version %s of the draft is left out, and %s stays: %s", version, drafts.version, error)
                return
            drafts.version = version

    async def _restart(self) -> None:
        self.restarts += 1
        if self._process is not None:
            log.warning("%s; starting it again (restart %d)", self._process.died(), self.restarts)
            await self._process.end()
        await self._start()

    def _model_folder(self) -> Path:
        """The model's folder on this host, downloaded if it is elsewhere."""
        filesystem, path = fsspec.core.url_to_fs(self.settings.model_url, **self.settings.storage_options)
        if "file" in (filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)):
            return Path(path)
        if self._cache is None:
            raise EngineDied("the worker is closing")
        target = self._cache.folder / "model"
        target.mkdir(exist_ok=True)
        for name in filesystem.ls(path, detail=False):
            file = target / name.rsplit("/", 1)[-1]
            if file.suffix != ".safetensors" and not file.exists():  # weights come from the store
                aside = file.with_suffix(f".aside-{id(self)}")
                filesystem.get_file(name, str(aside))
                aside.replace(file)
        return target


def _open_drafts(settings: EngineLaunch) -> DraftVersions:
    from rollart.engines.draft_versions import DraftVersions  # as in `_open_cache`

    return DraftVersions(settings.speculation, settings.storage_options)


def _open_cache(weights_url: str, storage_options: Mapping[str, Any], token: str, address: str, alone: bool) -> WeightCache:
    # Imported here, since it brings torch: the control process imports this module too, to send the plugin.
    from rollart.engines.weight_cache import WeightCache
    from storage.weights import WeightStore

    return WeightCache(WeightStore(weights_url, storage_options), alone=alone, token=token, address=address)


async def serve_task(version: Version, dask_worker: Worker, peers: Sequence[str] = (), coordinator: int = 0) -> EngineEntry:
    """`EngineHost.serve` of the worker that it runs on, for `Client.run`, which fills in `dask_worker`. EngineDied without a host there."""
    return await _host_of(dask_worker).serve(version, peers, coordinator)


async def chunk_server_task(dask_worker: Worker) -> str | None:
    """`EngineHost.chunk_server` of the worker that it runs on, as `serve_task`."""
    return await _host_of(dask_worker).chunk_server()


def _host_of(worker: Worker) -> EngineHost:
    host = worker.plugins.get(PLUGIN)
    if not isinstance(host, EngineHost):
        raise EngineDied(f"worker {worker.address} has no engine host; register an EngineHost plugin first")
    return host
