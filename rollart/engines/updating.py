"""Gives an engine new weights that lie in a folder of its host, in the way that this engine takes them; fetches none and chooses none."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollart.engines.client import EngineClient
from rollart.engines.settings import EngineLaunch, Selector

__all__ = ["give_weights"]


async def give_weights(client: EngineClient, launch: EngineLaunch, url: str, folder: Path, version: str, selector: Selector = "target") -> None:
    """Has the engine at `url`, started as `launch` says, serve the folder's weights as `version`, or draft from them. Raises as `client` does."""
    if launch.by_tensors:
        # Imported here, since it brings torch, which a worker's process may never need.
        from rollart.engines.sglang.tensors import described, shared_weights

        weights = await asyncio.to_thread(shared_weights, folder)
        ranks = await asyncio.to_thread(described, [weights] * launch.by_tensors)
        # A draft's weights leave the policy's KV as it is.
        swap = launch.swap if selector == "target" else "in_place"
        await client.update_by_tensors(url, ranks, selector, version if selector == "target" else None, swap)
    elif selector == "target":
        await client.update_weights(url, str(folder), version, launch.swap)
    else:
        await client.update_draft(url, str(folder), version)
