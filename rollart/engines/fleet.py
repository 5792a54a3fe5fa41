"""All engines of a run, from the control side: has them serve a version, tells the rollout workers which serve what, and brings both back."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping

from distributed import Client

from rollart.cluster import WorkerLeft, run_on, workers_of
from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineError, NoEngine
from rollart.engines.host import chunk_server_task, serve_task
from rollart.engines.router import EngineEntry, EngineTable, Routes
from rollart.rollout.worker import push_table
from storage.version import Version

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""Between two looks at whether every engine answers and every rollout worker has the table."""

RECOVERY_S = 120.0
"""How long engines may take to serve again, unless they are slow to start: a worker process starts in seconds, and its engine loads torch after
that."""


class EngineFleet:
    """The engines on the workers with one of the resources `generate`, and the rollout workers, which have one of `environment`.

    Workers are looked up each time, since one that was restarted has another address. An engine is in the table only while it is known
    to serve the version that stands there. Workers heed it as long as they are `coordinator`'s; if not, what is called here is Superseded.
    What is lost is waited for, `recovery_s` seconds.
    """

    def __init__(
        self, client: Client, generate: frozenset[str], environment: frozenset[str], coordinator: int = 0, recovery_s: float = RECOVERY_S
    ) -> None:
        self._client, self._generate, self._environment, self._recovery_s = client, generate, environment, recovery_s
        self._http = EngineClient()
        self._version: Version | None = None
        self._hosts: list[str] = []
        self._told: set[str] = set()
        self._lock = asyncio.Lock()
        self.table = EngineTable(coordinator=coordinator)
        self._routes = Routes({})

    async def serve(self, version: Version) -> None:
        """Has every engine pull `version` and swap to it between two decode steps; returns once all serve it and the workers know.

        An engine or its worker may die meanwhile and is waited for; EngineError if it is not back within `recovery_s`.
        """
        async with self._lock:
            self._version = version
            await self._bring(version)

    async def route(self, wanted: Mapping[str, str], probes: Mapping[str, str]) -> None:
        """Has the workers send each task's requests to the class that it wants, and some of its trajectories' to the one in `probes`."""
        async with self._lock:
            self._routes = dataclasses.replace(self._routes, wanted=dict(wanted), probes=dict(probes), revision=self._routes.revision + 1)
            if self._version is not None:
                _, players = await self._look()
                await self._push(players, self._version)

    async def keep(self) -> None:
        """Watches, until it is cancelled: whatever lost its engine serves the same version again, whichever worker is new gets the table."""
        while True:
            await asyncio.sleep(WATCH_S)
            async with self._lock:
                if self._version is None:
                    continue
                hosts, players = await self._look()
                if hosts != self._hosts or not await self._all_answer():
                    log.warning("an engine is gone; version %s is served again", self._version)
                    await self._bring(self._version)
                elif not self._told.issuperset(players):
                    await self._push(players, self._version)

    async def tokens(self) -> int | None:
        """Tokens sampled by all engines since they started; None if one does not answer just now."""
        if not self.table.entries:
            return None
        try:
            return sum(await asyncio.gather(*(self._http.generated_tokens(e.url) for e in self.table.entries)))
        except EngineError:
            return None

    async def close(self) -> None:
        await self._http.close()

    # ---- inside

    async def _bring(self, version: Version) -> None:
        deadline = time.monotonic() + self._recovery_s
        while True:
            hosts, players = await self._look()
            try:
                entries = await self._serve_on(hosts, version)
            except (EngineError, OSError) as error:
                if time.monotonic() > deadline:
                    raise
                log.warning("version %s is not served yet, %.0f s are left: %s", version, deadline - time.monotonic(), error)
                await asyncio.sleep(WATCH_S)
                continue
            self._hosts = hosts
            self.table = dataclasses.replace(self.table, entries=tuple(entries[h] for h in hosts), revision=self.table.revision + 1)
            self._told = set()
            await self._push(players, version)
            return

    async def _serve_on(self, hosts: list[str], version: Version) -> dict[str, EngineEntry]:
        if not hosts:
            raise NoEngine(", ".join(sorted(self._generate)), ())
        peers = await self._chunk_servers(hosts)
        entries: dict[str, EngineEntry] = await run_on(
            self._client, serve_task, version, peers=peers, coordinator=self.table.coordinator, workers=hosts
        )
        return entries

    async def _chunk_servers(self, hosts: list[str]) -> tuple[str, ...]:
        """Where the hosts can read from each other. One that can't serve costs the store its share, and nobody the version."""
        if len(hosts) < 2:
            return ()
        answers = await run_on(self._client, chunk_server_task, workers=hosts, on_error="return")
        for address, answer in answers.items():
            if isinstance(answer, Exception):
                log.warning("worker %s serves no chunks to the other hosts: %s: %s", address, type(answer).__name__, answer)
        return tuple(sorted({answer for answer in answers.values() if isinstance(answer, str)}))

    async def _push(self, players: list[str], version: Version) -> None:
        """Tells the workers; one that is gone by now, or not set up yet, is told when `keep` finds it."""
        if self._routes.wanted and self._routes.sharers != len(players):
            self._routes = dataclasses.replace(self._routes, sharers=max(len(players), 1), revision=self._routes.revision + 1)
        try:
            taken = await run_on(self._client, push_table, self.table, version.step, self._routes, workers=players, on_error="return")
        except WorkerLeft:
            return
        for address, answer in taken.items():
            if isinstance(answer, Exception) and not isinstance(answer, OSError):
                raise answer
            if answer is True:
                self._told.add(address)

    async def _look(self) -> tuple[list[str], list[str]]:
        """Addresses of the generation workers and of the rollout workers, by name."""
        workers = await workers_of(self._client)
        hosts = [w.address for w in workers if self._generate & {r for r, n in w.resources.items() if n >= 1}]
        players = [w.address for w in workers if self._environment & {r for r, n in w.resources.items() if n >= 1}]
        return hosts, players

    async def _all_answer(self) -> bool:
        try:
            await asyncio.gather(*(self._http.health(e.url) for e in self.table.entries))
        except EngineError:
            return False
        return True
