"""Tiny models, the engine processes that serve them, and transformers' own word on what they should have said.

With ROLLART_ENGINE=sglang the contract suite runs against a real SGLang server in place of the embedded engine (`make sglang`); with
ROLLART_ENGINE_URL and ROLLART_ENGINE_MODEL (the folder it serves as version 0-0) as well, against one that is already there.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from rollart.engines.client import EngineClient
from rollart.engines.settings import Swap
from rollart.engines.sglang.settings import SglangSettings
from tests.sglang import PYTHON

torch.set_num_threads(1)

KIND = os.environ.get("ROLLART_ENGINE", "embedded")
"""Which engine the contract suite is about: embedded or sglang."""

SWAPS: tuple[Swap, ...] = ("between_steps", "retracting", "in_place") if KIND == "embedded" else ("retracting", "in_place")
"""How that engine's weights can be swapped; the first leaves none of the old KV. An SGLang server that isn't halted may still hold a response
that it has answered: an update that comes at once changes the weights and then fails, since the cache can't be emptied."""

VOCABULARY = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.15, "eos_token_id": 1, "bos_token_id": 0,
    "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
_KINDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama_untied": lambda: LlamaConfig(**{**_SHAPE, "tie_word_embeddings": False}),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16),
    "gemma2": lambda: Gemma2Config(**_SHAPE, head_dim=16, sliding_window=12, query_pre_attn_scalar=16),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE, head_dim=16, sliding_window=12, query_pre_attn_scalar=16),
}


@dataclass(frozen=True)
class Tiny:
    """Tiny random models, and what a plain transformers forward pass says of them."""

    vocabulary: int = VOCABULARY

    def model(self, kind: str = "llama", seed: int = 0) -> PreTrainedModel:
        """A model of `kind` in fp32, its weights drawn with `seed`."""
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(_KINDS[kind](), dtype=torch.float32).eval()

    def greedy(self, model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
        """What transformers' generate continues `prompt` with."""
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                             eos_token_id=VOCABULARY + 1)  # fmt: skip
        return out[0, len(prompt) :].tolist()

    def distribution(self, model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """log_softmax(logits / T) after each of `ids`, [len(ids), V]."""
        with torch.no_grad():
            return (model(torch.tensor([list(ids)])).logits[0] / temperature).log_softmax(-1)

    def logprobs(self, model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> list[float]:
        """The log-probability of each token of `response`."""
        rows = self.distribution(model, [*prompt, *response], temperature)[len(prompt) - 1 : -1]
        return rows.gather(1, torch.tensor(list(response)).unsqueeze(1)).squeeze(1).tolist()

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """A prompt without special tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()


def running_engine(*arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """An embedded engine's process; it ends with the block."""
    return running("-m", "rollart.engines.embedded", *arguments)


PATIENCE_S = {"embedded": 90.0, "sglang": 300.0}
"""How long an engine may take to come up."""


@contextmanager
def running(*command: str, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """`python COMMAND`, an engine that says on stdout where it listens and ends when its stdin closes; it ends with the block."""
    variables = {**os.environ, **(environment or {})}
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    """The URL that the engine prints once it is healthy."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S[KIND])
    assert ready, "the engine did not come up"
    return str(json.loads(process.stdout.readline())["url"])


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Callable[..., str]]:
    """Starts engines that live until the end of the session, and returns their URLs."""
    with ExitStack() as stack:
        yield lambda *arguments: url_of(stack.enter_context(running_engine(*arguments)))


@pytest.fixture(scope="session")
def start_sglang() -> Iterator[Callable[[SglangSettings], str]]:
    """Starts SGLang servers as a generation worker does, that live until the end of the session, and returns their URLs."""
    with ExitStack() as stack:

        def start(settings: SglangSettings) -> str:
            command = settings.command(Path(settings.model_url), "127.0.0.1")
            return url_of(stack.enter_context(running(*command, environment=settings.environment)))

        yield start


@dataclass(frozen=True)
class Served:
    """The engine under test, the models of the two versions it may serve (0-0 first) and their folders."""

    url: str
    models: tuple[PreTrainedModel, PreTrainedModel]
    folders: tuple[Path, Path]


@pytest.fixture(scope="session")
def session_served(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Served:
    other = tmp_path_factory.mktemp("other")
    if "ROLLART_ENGINE_URL" in os.environ:
        folder = Path(os.environ["ROLLART_ENGINE_MODEL"])
        url = os.environ["ROLLART_ENGINE_URL"]
    else:
        folder = tmp_path_factory.mktemp("model")
        tiny.model().save_pretrained(folder)
        if KIND == "sglang":
            settings = SglangSettings(str(folder), python=str(PYTHON), slots=48, max_length=2048, chunk=256, stream_interval=1)
            url = request.getfixturevalue("start_sglang")(settings)
        else:
            arguments = ("--model", str(folder), "--weight-version", "0-0", "--slots", "48", "--chunk", "256")
            url = request.getfixturevalue("start_engine")(*arguments)
    first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    second = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    second.save_pretrained(other)
    return Served(url, (first, second), (folder, other))


class Wire:
    """Raw HTTP to an engine: status and JSON body, no client of the project in between."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def update(self, folder: Path, version: str, **more: Any) -> tuple[int, Any]:
        """Has the engine load `folder` and serve it as `version`."""
        body = {"model_path": str(folder), "weight_version": version, "load_format": "safetensors", **more}
        return await self.post("/update_weights_from_disk", body)

    async def flush(self) -> int:
        """Empties the prefix cache, once the engine has let go of what it has answered; the status."""
        return (await self.post("/flush_cache?timeout=10", {}))[0]

    async def generate(self, ids: Sequence[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
        """A reply with log-probabilities; what is no key of the body goes into the sampling parameters. End of sequence ignored."""
        body = {key: more.pop(key) for key in ("rid", "extra_key") if key in more}
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        status, reply = await self.post("/generate", {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **body})
        assert status == 200, reply
        return reply  # type: ignore[no-any-return]

    async def stream(self, ids: Sequence[int], tokens: int, **more: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed reply, each with all tokens so far, as which SGLang's have the new ones alone."""
        said: list[int] = []
        entries: list[Any] = []
        async for event in self.events(ids, tokens, **more):
            end = event["meta_info"]["completion_tokens"]
            for whole, part in ((said, event["output_ids"]), (entries, event["meta_info"]["output_token_logprobs"])):
                whole[end - len(part) :] = part
            event["output_ids"], event["meta_info"]["output_token_logprobs"] = list(said), list(entries)
            yield event

    async def events(self, ids: Sequence[int], tokens: int, **more: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed reply as they come."""
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, **more.pop("sampling", {})}
        body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, "stream": True, **more}
        async with self.session.post(self.url + "/generate", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])


def logprobs_of(reply: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


@pytest.fixture
async def served(session_served: Served) -> AsyncIterator[Served]:
    """The engine at version 0-0, with nothing cached."""
    async with aiohttp.ClientSession() as session:
        wire = Wire(session, session_served.url)
        _, info = await wire.get("/model_info")
        if info["weight_version"] != "0-0":
            async with EngineClient() as client:
                await client.update_weights(session_served.url, str(session_served.folders[0]), "0-0", SWAPS[0])
        assert await wire.flush() == 200
        yield session_served


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Wire(session, served.url)


@pytest.fixture
def wire_to() -> Callable[[str], Any]:
    """A Wire to another engine, as an async context manager."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def connect(url: str) -> AsyncIterator[Wire]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Wire(session, url)

    return connect


@pytest.fixture
def logprobs() -> Callable[[dict[str, Any]], list[float]]:
    return logprobs_of


@pytest.fixture(scope="session")
def engine_process() -> Callable[..., Any]:
    """`running_engine`, for tests that end the process themselves."""
    return running_engine


@pytest.fixture(scope="session")
def engine_url() -> Callable[[subprocess.Popen[str]], str]:
    return url_of


@pytest.fixture
async def first_of() -> Callable[..., Any]:
    """Waits for the first event of a stream that satisfies a condition, and hands back the event and the rest's last one as a task."""

    async def wait(events: AsyncIterator[dict[str, Any]], enough: int) -> tuple[dict[str, Any], asyncio.Task[dict[str, Any]]]:
        async for event in events:
            if len(event["output_ids"]) >= enough:
                break

        async def rest() -> dict[str, Any]:
            last = event
            async for later in events:
                last = later
            return last

        return event, asyncio.create_task(rest())

    return wait
