"""Publishes the draft head that learns beside a run's policy, beside whatever comes next; decides neither when nor what is learnt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollart.training.handle import Trainer
from storage.errors import StoreError

__all__ = ["DRAFTS", "DraftPublisher"]

DRAFTS = "drafts"
"""The part of a run's folder that holds the versions of the head that learns in it."""


class DraftPublisher:
    """Versions carry `metadata`. That one can't be stored is told by `tell`, and ends nothing: it costs speed alone."""

    def __init__(self, trainer: Trainer, metadata: dict[str, Any], tell: Callable[[str], None]) -> None:
        self._trainer, self._metadata, self._tell = trainer, metadata, tell
        self._publishing: asyncio.Task[None] | None = None

    async def publish(self, lineage: int) -> None:
        """Starts to publish the head as it is; waits for the one before first."""
        await self.published()
        self._publishing = asyncio.create_task(self._publish(lineage))

    async def published(self) -> None:
        """Returns once the last `publish` is through."""
        if self._publishing is not None:
            await self._publishing
            self._publishing = None

    async def _publish(self, lineage: int) -> None:
        try:
            await self._trainer.publish_draft(lineage, self._metadata)
        except StoreError as error:
            self._tell(f"the draft head isn't published: {error}")
