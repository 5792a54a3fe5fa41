"""A real OpenEnv server: count up to what the seed says. Its port, chosen by the system, is printed."""

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Say(Action):
    message: str = Field(max_length=100)


class Heard(Observation):
    text: str


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self.at, self.last = 0, 2 + (seed or 0) % 3
        return Heard(text=f"count to {self.last}", reward=None, done=False)

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        if action.message == "break":
            raise RuntimeError("broken")
        self.at += action.message.strip() == str(self.at + 1)
        done = self.at == self.last
        return Heard(text=f"at {self.at}", reward=float(done), done=done)

    @property
    def state(self) -> State:
        return State(step_count=self.at)


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"port {listening.getsockname()[1]}", flush=True)
    app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=8)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
