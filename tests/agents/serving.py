"""A tiny policy, one that says what it is told to, and an attempt whose URL an OpenAI client speaks to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rollart.agents.answering import Answering, Budget
from rollart.agents.rendering import Rendering
from rollart.agents.server import AgentServer, Bounds, Door
from rollart.agents.tool_calls import Hermes
from rollart.policy import train_tokenizer
from rollart.types import Attempt, Episode, GenerateRequest, GenerateResult, SamplingTransform, Segment, Version

torch.set_num_threads(1)

ATTEMPT = Attempt(Episode("chat", 3), 1)
TEMPERATURE = 0.7


def save_policy(folder: Path, template: str | None = None, *special: str, seed: int = 0) -> Path:
    """A byte-level tokenizer, with `template` and its special tokens where there is one, and a random model."""
    tokenizer = train_tokenizer(["system user assistant tool"] * 3, vocab=320)
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.15, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


class Says:
    """A policy that answers with the given texts in turn, and remembers what it was asked. A text that ends with an ellipsis is cut off there."""

    def __init__(self, rendering: Rendering, *texts: str) -> None:
        self.rendering, self.texts, self.asked = rendering, list(texts), list[GenerateRequest]()

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        text = self.texts[len(self.asked)]
        self.asked.append(request)
        ids = self.rendering.vocabulary.encode(text.removesuffix("…"))
        if not text.endswith("…"):
            ids.append(self.rendering.vocabulary.eos_ids[0])
        n, version = len(ids), Version(0, 4)
        finish: Any = "length" if text.endswith("…") else "stop"
        return GenerateResult(request.rid, tuple(ids), (-0.5,) * n, (version,) * n, finish, len(request.input_ids), 1)


@dataclass
class Served:
    """An attempt that is served, and the OpenAI client of its agent."""

    door: Door
    answering: Answering
    client: openai.AsyncOpenAI
    server: AgentServer

    @property
    def segments(self) -> list[Segment]:
        return self.answering.recording.segments

    def text(self, segment: Segment) -> str:
        """The whole segment in words, special tokens too."""
        return "".join(self.answering.rendering.vocabulary._tokenizer.decode([i], skip_special_tokens=False) for i in segment.ids)

    async def ask(self, *messages: Any, **more: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=[spoken(m) for m in messages], **more)


def spoken(message: Any) -> Any:
    """A text is the user's."""
    return {"role": "user", "content": message} if isinstance(message, str) else message


@asynccontextmanager
async def serve(
    rendering: Rendering, generate: Any, budget: Budget | None = None, bounds: Bounds | None = None, transform: SamplingTransform | None = None
) -> AsyncIterator[Served]:
    server = AgentServer()
    await server.start()
    answering = Answering(
        ATTEMPT, f"0/{ATTEMPT}", rendering, Hermes(), transform or SamplingTransform(TEMPERATURE), budget or Budget(64, 12, 4096), 5, generate
    )  # fmt: skip
    try:
        with server.serve(answering, bounds or Bounds()) as door:
            async with openai.AsyncOpenAI(base_url=door.url, api_key=door.key, max_retries=0) as client:
                yield Served(door, answering, client, server)
    finally:
        await server.close()


def rescored(folder: Path, segment: Segment, version: int = 0) -> float:
    """The largest difference of a segment's log-probabilities, of what `version` sampled, to those of a plain forward pass of `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        rows = (model(torch.tensor([segment.ids])).logits[0] / TEMPERATURE).log_softmax(-1)
    sampled = [t for t, v in enumerate(segment.versions) if v == version]
    return max(abs(float(rows[t - 1, segment.ids[t]]) - segment.logprobs[t]) for t in sampled)
