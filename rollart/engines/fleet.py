"""All engines of a run, from the control side: has them serve a version, and tells the rollout workers which serve what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from distributed import Client

from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineError
from rollart.engines.host import serve_task
from rollart.engines.router import EngineEntry, EngineTable
from rollart.rollout.worker import push_table
from storage.version import Version


class EngineFleet:
    """`hosts` are the addresses of the generation workers, `players` those of the environment workers.

    An engine is in the table only while it is known to serve the version that stands there.
    """

    def __init__(self, client: Client, hosts: Sequence[str], players: Sequence[str]) -> None:
        self._client, self._hosts, self._players = client, list(hosts), list(players)
        self._http = EngineClient()
        self.table = EngineTable()

    async def serve(self, version: Version) -> None:
        """Has every engine pull `version` and swap to it between two decode steps; returns once all serve it and the workers know."""
        entries: dict[str, EngineEntry] = await self._client.run(serve_task, version, workers=self._hosts)
        self.table = EngineTable(tuple(entries[h] for h in self._hosts), self.table.revision + 1)
        await self._client.run(push_table, self.table, version.step, workers=self._players)

    async def tokens(self) -> int | None:
        """Tokens sampled by all engines since they started; None if one does not answer just now."""
        if not self.table.entries:
            return None
        try:
            loads = await asyncio.gather(*(self._http.loads(e.url) for e in self.table.entries))
        except EngineError:
            return None
        return sum(int(load["generated_tokens"]) for load in loads)

    async def close(self) -> None:
        await self._http.close()
