"""A remote environment over OpenEnv's WebSocket protocol; owns the session and which fields are text, its server owns the rest.

The protocol is that of openenv 0.10: JSON messages `reset`, `step` and `close` over `/ws`, answered by `observation` or `error`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import aiohttp
from pydantic import Field, field_validator

from rollart.environments.protocol import StepResult
from rollart.environments.registry import Settings

POLICYS_OWN = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
"""Errors that say of an action that it is none, rather than of the environment that it failed."""

LARGEST = 16 * 2**20
"""Bytes of a message at most."""


class RemoteFailed(RuntimeError):
    """The server can't be reached, refused the session, or failed: no action's doing."""


class OpenEnvSettings(Settings):
    """`url`: the server's, http or https. `action_field`: the field of its action that gets the response; empty if the response is the action, as a
    JSON object. `observation_field`: the field of its observation that is shown; empty for all of them as JSON. `reset`: further arguments of
    its reset. `turns`: actions an episode may take. `connect_s`: seconds that a session may take to open."""

    url: str
    action_field: str = "message"
    observation_field: str = ""
    reset: dict[str, Any] = Field(default_factory=dict)
    turns: int = Field(default=50, ge=1)
    connect_s: float = Field(default=30.0, gt=0)

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("write a URL that begins with http:// or https://")
        return url.rstrip("/")

    @field_validator("reset")
    @classmethod
    def _leaves_the_seed(cls, reset: dict[str, Any]) -> dict[str, Any]:
        if "seed" in reset:
            raise ValueError("seed cannot be set: the episode decides it")
        return reset


class OpenEnv:
    """A session of its own at the server for each episode; `close` ends it. Rewards and ends are the server's.

    An action that the server says is none, or that is no JSON object where one is wanted, earns 0 and uses up a turn.
    """

    Settings: ClassVar[type[OpenEnvSettings]] = OpenEnvSettings

    def __init__(self, settings: OpenEnvSettings) -> None:
        self.settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._turn = 0

    async def reset(self, seed: int) -> str:
        """RemoteFailed."""
        await self.close()
        self._turn = 0
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with asyncio.timeout(self.settings.connect_s):  # a server that accepts a connection may still never answer on it
                self._socket = await self._session.ws_connect(f"{self.settings.url}/ws", max_msg_size=LARGEST)
        except (aiohttp.ClientError, OSError) as error:
            raise RemoteFailed(f"{self.settings.url} opened no session: {type(error).__name__}: {error}") from error
        kind, data = await self._asked({"type": "reset", "data": {**self.settings.reset, "seed": seed % 2**31}})
        if kind == "error":
            raise RemoteFailed(f"{self.settings.url} refused to reset: {_said(data)}")
        return self._text(data)

    async def step(self, action: str) -> StepResult:
        """RemoteFailed."""
        self._turn += 1
        truncated = self._turn >= self.settings.turns
        payload = self._payload(action)
        if payload is None:
            return StepResult("" if truncated else "invalid: no JSON object\n", truncated=truncated, info={"turns": self._turn, "valid": False})
        kind, data = await self._asked({"type": "step", "data": payload})
        if kind == "error":
            if data.get("code") not in POLICYS_OWN:
                raise RemoteFailed(f"{self.settings.url} failed: {_said(data)}")
            return StepResult("" if truncated else f"invalid: {_said(data)}\n", truncated=truncated, info={"turns": self._turn, "valid": False})
        done = bool(data.get("done"))
        said = "" if done or truncated else self._text(data)
        return StepResult(said, float(data.get("reward") or 0.0), done, truncated and not done, {"turns": self._turn, "valid": True})

    async def close(self) -> None:
        socket, session, self._socket, self._session = self._socket, self._session, None, None
        try:
            if socket is not None and not socket.closed:
                await socket.close()  # upon which the server ends the session
        finally:
            if session is not None:
                await session.close()

    def _payload(self, action: str) -> dict[str, Any] | None:
        if self.settings.action_field:
            return {self.settings.action_field: action}
        try:
            found = json.loads(action)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    async def _asked(self, message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The type and the data of the server's answer."""
        if self._socket is None:
            raise RemoteFailed("no session is open; call reset first")
        try:
            await self._socket.send_json(message)
            answer = await self._socket.receive()
            found = json.loads(answer.data) if answer.type is aiohttp.WSMsgType.TEXT else None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RemoteFailed(f"{self.settings.url} gave no answer: {type(error).__name__}: {error}") from error
        if not isinstance(found, dict) or found.get("type") not in ("observation", "error") or not isinstance(found.get("data"), dict):
            raise RemoteFailed(f"{self.settings.url} ended the session or answered something else than OpenEnv's protocol says")
        return found["type"], found["data"]

    def _text(self, data: dict[str, Any]) -> str:
        observation, field = data.get("observation") or {}, self.settings.observation_field
        if not field:
            return json.dumps(observation) + "\n"
        if field not in observation:
            raise RemoteFailed(f"observation_field: the observation has no {field!r}, but {', '.join(observation)}")
        return f"{observation[field]}\n"


def _said(data: dict[str, Any]) -> str:
    return f"{data.get('code', 'error')}: {str(data.get('message', ''))[:300]}"
