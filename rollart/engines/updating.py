"""Gives an engine new weights that lie in a folder of its host, in the way that this engine takes them; fetches none and chooses none."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from rollart.engines.client import EngineClient
from rollart.engines.settings import EngineLaunch, Selector

__all__ = ["give_weights"]

log = logging.getLogger(__name__)


async def give_weights(
    client: EngineClient, launch: EngineLaunch, model: Path, url: str, folder: Path, version: str, selector: Selector = "target"
) -> None:
    """Has the engine at `url`, started as `launch` says with the `model` in a local folder, serve the weights in `folder` as `version`, or draft
    from them. Raises as `client` does, and OSError."""
    if launch.by_tensors:
        await _send(client, launch, model, url, folder, version, selector)
    elif selector == "target":
        await client.update_weights(url, str(folder), version, launch.swap)
    else:
        await client.update_draft(url, str(folder), version)


async def _send(client: EngineClient, launch: EngineLaunch, model: Path, url: str, folder: Path, version: str, selector: Selector) -> None:
    # Imported here, since they bring torch: the control process, that sends workers their plugin, imports this module too.
    from rollart.engines.sglang.slices import Shape, UnknownLayout, rank_of
    from rollart.engines.sglang.tensors import described, shared_weights

    ranks = launch.by_tensors
    weights = await asyncio.to_thread(shared_weights, folder)
    if selector == "draft":
        # A draft is not divided as its policy is, and its weights leave the policy's KV as it is.
        await client.update_by_tensors(url, await asyncio.to_thread(described, [weights] * ranks), selector, None, "in_place")
        return
    held, parts = [weights] * ranks, False
    if ranks > 1:
        try:
            shape = Shape.of(json.loads((model / "config.json").read_text()))
            held, parts = [rank_of(weights, shape, rank, ranks) for rank in range(ranks)], True
        except UnknownLayout as unknown:
            log.info("each rank gets all of version %s: %s", version, unknown)
    await client.update_by_tensors(url, await asyncio.to_thread(described, held), selector, version, launch.swap, parts)
