"""Plays episodes of one environment here, by a policy of four kinds, and shows each turn; owns those policies, no cluster and no run."""

from __future__ import annotations

import asyncio
import inspect
import random
import string
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import aiohttp

from rollart.config import ConfigError
from rollart.environments.protocol import Choosing, Environment, Scripted, StepResult, is_agent
from rollart.environments.registry import make

Policy = Callable[[list[str]], Awaitable[str]]
"""The next action, from what was said so far: observation, action, observation, ..."""

POLICIES = ("scripted", "random", "human")

SERVED_S = 120.0
"""How long a served policy has for one answer."""


class EpisodeBroke(RuntimeError):
    """The environment or the served policy failed, which no action can cause."""


@dataclass(frozen=True, slots=True)
class Served:
    """A policy behind a URL: an engine's own, for which `tokenizer` (a folder) turns text into tokens, or one that ends in /v1, OpenAI's API."""

    url: str
    model: str | None = None
    tokenizer: str | None = None
    max_tokens: int = 64


async def play(
    name: str, settings: dict[str, Any], policy: str | Served, seed: int, turns: int, show: Callable[[str, str], None], read: Callable[[], str]
) -> dict[str, Any]:
    """One episode, its reward and its last `info`. `show` is told of each turn (what, text); `read` gives a person's action.

    ConfigError for what the user asked wrongly, EpisodeBroke for what failed; at most `turns` actions are taken.
    """
    try:
        made = make(name, **settings)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if is_agent(made):
        raise ConfigError(f"{name} is an agent, which runs its own loop against a run's URL; environments that take actions can be tried")
    environment = cast(Environment, made)
    try:
        async with _policy(name, environment, policy, seed, read) as act:
            return await _episode(environment, act, seed, turns, show)
    finally:
        await _call(environment.close)


async def _episode(environment: Environment, act: Policy, seed: int, turns: int, show: Callable[[str, str], None]) -> dict[str, Any]:
    total, taken, result = 0.0, 0, StepResult("")
    said = [str(await _call(environment.reset, seed))]
    show("observation", said[0])
    while taken < turns and not (result.terminated or result.truncated):
        action = await act(said)
        show("action", action)
        result = await _call(environment.step, action)
        total, taken = total + result.reward, taken + 1
        show("reward", f"{result.reward:g}")
        if result.observation:
            show("observation", result.observation)
        said += [action, result.observation]
    ended = "terminated" if result.terminated else "truncated" if result.truncated else "out of turns"
    return {"seed": seed, "turns": taken, "reward": total, "ended": ended, "info": result.info}


async def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """What the environment's method gives, in a thread unless it is a coroutine function."""
    try:
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await asyncio.to_thread(method, *arguments)
    except Exception as error:  # code of others
        raise EpisodeBroke(f"{getattr(method, '__name__', 'the environment')} raised {type(error).__name__}: {error}") from error


@asynccontextmanager
async def _policy(name: str, environment: Environment, policy: str | Served, seed: int, read: Callable[[], str]) -> AsyncIterator[Policy]:
    rng = random.Random(seed)
    if isinstance(policy, Served):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SERVED_S)) as session:
            yield _chat(session, policy) if policy.url.rstrip("/").endswith("/v1") else _engine(session, policy, seed)
        return
    if policy == "scripted" and not isinstance(environment, Scripted):
        raise ConfigError(f"{name} has no script(), so that it cannot play itself; try --policy random")

    async def act(said: list[str]) -> str:
        if policy == "human":
            return await asyncio.to_thread(read)
        if policy == "scripted" and isinstance(environment, Scripted):
            return await asyncio.to_thread(environment.script, rng)
        if isinstance(environment, Choosing):
            return rng.choice(environment.actions() or [""])
        return "".join(rng.choices(string.ascii_lowercase + string.digits + " ", k=8))

    yield act


def _chat(session: aiohttp.ClientSession, served: Served) -> Policy:
    async def act(said: list[str]) -> str:
        url = served.url.rstrip("/")
        model = served.model or (await _json(session, "GET", f"{url}/models", None))["data"][0]["id"]
        messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]
        body = {"model": model, "messages": messages, "max_tokens": served.max_tokens}
        return str((await _json(session, "POST", f"{url}/chat/completions", body))["choices"][0]["message"]["content"] or "")

    return _told_if_odd(act, served)


def _engine(session: aiohttp.ClientSession, served: Served, seed: int) -> Policy:
    if served.tokenizer is None:
        raise ConfigError("--tokenizer: an engine takes tokens; give the folder of its policy's tokenizer, or a URL that ends in /v1")
    from rollart.rollout.vocabulary import Vocabulary

    vocabulary = Vocabulary(served.tokenizer)

    async def act(said: list[str]) -> str:
        ids = [token for i, text in enumerate(said) for token in vocabulary.encode(text, first=i == 0)]
        sampling = {"max_new_tokens": served.max_tokens, "stop_token_ids": list(vocabulary.eos_ids), "sampling_seed": seed + len(said)}
        answer = await _json(session, "POST", f"{served.url.rstrip('/')}/generate", {"input_ids": ids, "sampling_params": sampling})
        return vocabulary.decode([token for token in answer["output_ids"] if token not in vocabulary.eos_ids])

    return _told_if_odd(act, served)


def _told_if_odd(act: Policy, served: Served) -> Policy:
    async def told(said: list[str]) -> str:
        try:
            return await act(said)
        except (KeyError, IndexError, TypeError) as error:
            raise EpisodeBroke(f"{served.url} answered something else than its protocol says: {type(error).__name__}: {error}") from error

    return told


async def _json(session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None) -> Any:
    try:
        async with session.request(method, url, json=body) as response:
            if response.status != 200:
                raise EpisodeBroke(f"{url} answered {response.status}: {(await response.text())[:300]}")
            return await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EpisodeBroke(f"{url} gave no answer: {type(error).__name__}: {error}") from error
