"""What the agents of one worker share: their server and the policy's rendering, made when the first of them begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollart.agents.answering import Budget
from rollart.agents.parameters import OtherParameters
from rollart.agents.play import AgentRunner
from rollart.agents.rendering import Rendering
from rollart.agents.server import AgentServer, Bounds
from rollart.agents.tool_calls import tool_format
from rollart.rollout.episode import EpisodeFailed, EpisodeRunner

__all__ = ["AgentLimits", "SharedByAgents"]


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Bounds of a task's agents: seconds of a run, requests in flight, bytes of a body, what becomes of parameters that are not their business,
    and how the policy writes tool calls."""

    run_s: float = 240.0
    requests: int = 8
    body: int = 1 << 20
    others: OtherParameters = "ignore"
    tool_format: str = "hermes"


class SharedByAgents:
    """`host`: where attempts' URLs are served; `folder`: finds the policy's folder."""

    def __init__(self, host: str, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self.server = AgentServer(host)
        self._rendering: Rendering | None = None
        self._making = asyncio.Lock()

    async def runner(self, like: EpisodeRunner, limits: AgentLimits) -> AgentRunner:
        """What plays one attempt, otherwise as `like` would play one of an environment; EpisodeFailed where no URL can be served."""
        try:
            spelling = tool_format(limits.tool_format)
            await self.server.start()
            async with self._making:
                if self._rendering is None:
                    self._rendering = await asyncio.to_thread(lambda: Rendering.of_folder(self._folder()))
        except (OSError, ValueError) as error:
            raise EpisodeFailed(f"agents can't be served at rollout.agent_host: {type(error).__name__}: {error}", "machine") from error
        budget = Budget(like.limits.max_turns, like.limits.max_new_tokens, like.limits.max_tokens)
        bounds = Bounds(limits.requests, limits.body, limits.others)
        return AgentRunner(
            self.server, self._rendering, spelling, budget, bounds, limits.run_s, like.transform, like.run_seed, like.lineage, like.window, like.pool,
            like.tell,
        )  # fmt: skip

    async def close(self) -> None:
        await self.server.close()
