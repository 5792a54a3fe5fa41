"""An agent as its author would write it for any OpenAI endpoint: a plain function of the SDK, in a thread."""

from __future__ import annotations

import random

import openai

from rollart.environments.protocol import AgentResult


class Letters:
    """Wants small letters: in two turns of one conversation, the second streamed, and from a helper in a conversation of its own."""

    def run(self, seed: int, url: str, key: str) -> AgentResult:
        colour = random.Random(seed).choice(["red", "blue"])
        with openai.OpenAI(base_url=url, api_key=key) as client:
            messages: list = [{"role": "user", "content": colour}]
            first = client.chat.completions.create(model="gpt-4o-mini", messages=messages, temperature=0.3).choices[0].message
            messages += [first, {"role": "user", "content": "more"}]
            stream = client.chat.completions.create(model="gpt-4o-mini", messages=messages, stream=True)
            second = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            third = client.responses.create(model="gpt-4o-mini", input="help").output_text
        said = [first.content or "", second, third]
        shares = [sum("a" <= c <= "z" for c in text) / len(text) if text else 0.0 for text in said]
        return AgentResult(sum(shares) / 3, {"said": said})
