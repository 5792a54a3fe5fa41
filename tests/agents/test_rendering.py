"""Messages as the model's own chat template says them, with tools and calls, and as plain text where it has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollart.agents.errors import ApiError
from rollart.agents.messages import Message
from rollart.agents.rendering import Rendering
from rollart.agents.tool_calls import Hermes, ToolCall, UnknownFormat, tool_format
from rollart.policy import load_tokenizer
from tests.agents.serving import Says, save_policy, serve
from tests.smollm2 import save_tokenizer

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""As Qwen2.5's, without its words on how to call."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("qwen"), QWEN, "<|im_start|>", "<|im_end|>")


def test_tools_and_calls_are_what_transformers_makes_of_them(qwen: Path) -> None:
    rendering, tokenizer = Rendering.of_folder(qwen), load_tokenizer(qwen)
    messages = [Message("user", "1+1?"), Message("assistant", "I add.", (ToolCall("c1", "add", '{"a": 1}'),)), Message("tool", "2", call_id="c1")]
    raw = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    wanted = tokenizer.apply_chat_template(raw, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert rendering.text(messages, [TOOL], Hermes()) == wanted and CALL in wanted
    assert rendering.opening(wanted) == tokenizer.apply_chat_template(raw, tools=[TOOL], add_generation_prompt=True)["input_ids"]


async def test_several_calls_and_their_answers_go_on_from_the_sampled_ids(qwen: Path) -> None:
    rendering = Rendering.of_folder(qwen)
    odd = '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>'  # not as the template would write it
    async with serve(rendering, Says(rendering, odd + odd, "2"), bounds=None) as served:
        message = (await served.ask("1+1?", tools=[TOOL])).choices[0].message
        assert [c.function.arguments for c in message.tool_calls] == ['{"a":1}'] * 2 and message.content is None
        answers = [{"role": "tool", "tool_call_id": c.id, "content": "2"} for c in message.tool_calls]
        await served.ask("1+1?", message, *answers, tools=[TOOL])
        (segment,) = served.segments
        response = "\n<tool_response>\n2\n</tool_response>"
        assert served.text(segment).endswith(
            f"assistant\n{odd}{odd}<|im_end|>\n<|im_start|>user{response}{response}<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
        )


def test_a_template_that_knows_no_tools_has_them_told_as_text(tmp_path: Path) -> None:
    plain = Rendering.of_folder(save_policy(tmp_path))
    called = Message("assistant", "", (ToolCall("c", "add", '{"a": 1}'),))
    text = plain.text([Message("system", "s"), Message("user", "u"), called, Message("tool", "2", call_id="c")], [TOOL], Hermes())
    assert text.startswith("system: s\n\nYou may call functions.") and json.dumps(TOOL) in text
    assert text.endswith(f"user: u\nassistant: {CALL}<eos>\ntool: 2\nassistant: ")


def test_messages_that_the_template_refuses_are_the_agent_s_mistake(tmp_path: Path) -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0]['content'] }}"
    rendering = Rendering.of_folder(save_policy(tmp_path, refuses))
    with pytest.raises(ApiError, match="refuses these messages: no system role") as error:
        rendering.text([Message("system", "s")], [], Hermes())
    assert error.value.status == 400


def test_a_tool_format_is_found_by_name_or_path() -> None:
    assert isinstance(tool_format("rollart.agents.tool_calls:Hermes"), Hermes)
    with pytest.raises(UnknownFormat, match="known are hermes"):
        tool_format("xml")
    with pytest.raises(UnknownFormat, match="it lacks parse, write, describe"):
        tool_format("collections:Counter")


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    """The real tokenizer and template, if they are installed."""
    save_tokenizer(tmp_path)
    return tmp_path


async def test_a_real_model_s_conversation_is_one_segment_that_reads_as_its_template_says(smollm2: Path) -> None:
    rendering, tokenizer = Rendering.of_folder(smollm2), load_tokenizer(smollm2)
    async with serve(rendering, Says(rendering, "It is 4.", CALL, "Done.")) as served:
        first = (await served.ask("2+2?")).choices[0].message
        second = (await served.ask("2+2?", first, "and 1+1?")).choices[0].message
        await served.ask("2+2?", first, "and 1+1?", second, "so?")
        (segment,) = served.segments
        said = [("user", "2+2?"), ("assistant", "It is 4."), ("user", "and 1+1?"), ("assistant", CALL), ("user", "so?"), ("assistant", "Done.")]
        text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in said], tokenize=False)
        assert served.text(segment) + "\n" == text and segment.ids == tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]
    async with serve(rendering, Says(rendering, CALL, "2")) as served:
        called = (await served.ask("1+1?", tools=[TOOL])).choices[0].message
        await served.ask("1+1?", called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "2"}, tools=[TOOL])
        assert len(served.segments) == 1 and "<|im_start|>tool\n2<|im_end|>" in served.text(served.segments[0])
