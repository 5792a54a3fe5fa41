"""Chat completions and responses by the OpenAI SDK: whole and streamed answers say the same, tools go round, parameters are heeded or refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from rollart.agents.rendering import Rendering
from rollart.agents.server import Bounds
from tests.agents.serving import Says, Served, serve, spoken

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1, "b": [2]}}\n</tool_call>'


async def streamed(served: Served, *messages: Any, **more: Any) -> dict[str, Any]:
    """What the chunks of a streamed completion come to."""
    found: dict[str, Any] = {"content": "", "calls": [], "logprobs": [], "usage": None, "finish_reason": None}
    async for chunk in await served.ask(*messages, stream=True, **more):
        found["usage"] = chunk.usage
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["finish_reason"] = choice.finish_reason
            found["logprobs"] += choice.logprobs.content if choice.logprobs else []
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(found["calls"])
                    found["calls"].append((call.function.name, ""))
                name, arguments = found["calls"][call.index]
                found["calls"][call.index] = (name, arguments + call.function.arguments)
    return found


@pytest.mark.parametrize(
    "text", ["7 and\n more of it, longer than a single event would hold, so that it comes in parts", "", "so…", f"I add.{CALL}", CALL, CALL + CALL]
)
async def test_a_stream_says_what_the_whole_answer_says(rendering: Rendering, text: str) -> None:
    async with serve(rendering, Says(rendering, text, text)) as served:
        whole = await served.ask("a", tools=[TOOL], logprobs=True)
        parts = await streamed(served, "a", tools=[TOOL], logprobs=True, stream_options={"include_usage": True})
        one = whole.choices[0]
        calls = [(c.function.name, c.function.arguments) for c in one.message.tool_calls or ()]
        assert len(calls) == text.count("<tool_call>") and one.finish_reason == ("length" if text == "so…" else "tool_calls" if calls else "stop")
        assert parts == {
            "content": one.message.content or "", "calls": calls, "logprobs": one.logprobs.content, "usage": whole.usage,
            "finish_reason": one.finish_reason,
        }  # fmt: skip
        assert len(served.segments) == 2 and served.segments[0].ids == served.segments[1].ids


async def test_a_stream_ends_with_done_and_tells_usage_only_if_asked(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, "1", "2")) as served:
        body = {"model": "m", "messages": [spoken("a")], "stream": True}
        headers = {"Authorization": f"Bearer {served.door.key}"}
        plain = (await served.client._client.post(f"{served.door.url}/chat/completions", json=body, headers=headers)).text
        assert plain.rstrip().endswith("data: [DONE]") and "usage" not in plain
        told = await served.ask("a", stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in told]
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 2 and all(c.usage is None for c in chunks[:-1])


async def test_a_tool_call_goes_round_and_its_tokens_stay_as_sampled(rendering: Rendering) -> None:
    says = Says(rendering, f"I add.{CALL}", "3")
    async with serve(rendering, says) as served:
        first = (await served.ask("1+2", tools=[TOOL])).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content == "I add."
        (call,) = first.message.tool_calls
        assert call.function.name == "add" and call.function.arguments == '{"a":  1, "b": [2]}'  # as it was written
        rewritten = json.dumps(json.loads(call.function.arguments))  # an agent may have read and written it again
        said = {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "add", "arguments": rewritten}}],
        }
        answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        second = await served.ask("1+2", said, answer, tools=[TOOL])
        assert second.choices[0].message.content == "3" and second.choices[0].finish_reason == "stop"
        (segment,) = served.segments
        described, _, rest = served.text(segment).partition("user: ")
        assert described.startswith("system: You may call functions.") and json.dumps(TOOL) in described
        assert rest == f"1+2\nassistant: I add.{CALL}<eos>\ntool: 3\nassistant: 3<eos>"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>', "<tool_call>__import__('os')</tool_call>", "<tool_call>" + "[" * 5000, "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1},}</tool_call>', "<tool_call>",
    ],
)  # fmt: skip
async def test_a_malformed_call_stays_text(rendering: Rendering, text: str) -> None:
    async with serve(rendering, Says(rendering, text)) as served:
        choice = (await served.ask("a", tools=[TOOL])).choices[0]
        assert choice.message.content == text and choice.message.tool_calls is None and choice.finish_reason == "stop"


async def test_calls_stay_text_where_there_are_no_tools_or_the_agent_wants_none(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, CALL, CALL)) as served:
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            assert (await served.ask("a", **more)).choices[0].message.content == CALL


async def test_a_stop_string_ends_the_answer_and_what_was_sampled_behind_it_is_not_recorded(rendering: Rendering) -> None:
    says = Says(rendering, "one;two;three", "x")
    async with serve(rendering, says) as served:
        choice = (await served.ask("a", stop=["three", ";"])).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one", "stop")
        await served.ask("a", choice.message, "b")
        (segment,) = served.segments
        assert served.text(segment) == "user: a\nassistant: one;<eos>\nuser: b\nassistant: x<eos>"
        assert segment.sampled == len(rendering.vocabulary.encode("one;")) + 2


SAME = {"temperature": 0.7, "top_p": 1, "n": 1, "presence_penalty": 0, "user": "me", "seed": None, "logit_bias": {}, "parallel_tool_calls": True}
OTHER: list[dict[str, Any]] = [
    {"temperature": 0.2}, {"top_p": 0.9}, {"frequency_penalty": 1}, {"seed": 1}, {"logit_bias": {"5": 3}},
    {"response_format": {"type": "json_object"}},
    {"extra_body": {"top_k": 5}}, {"extra_body": {"anything": 1}}, {"tool_choice": "required", "tools": [TOOL]},
    {"logprobs": True, "top_logprobs": 3},
]  # fmt: skip


async def test_parameters_that_say_what_happens_anyway_pass(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, "1"), bounds=Bounds(others="refuse")) as served:
        await served.ask("a", **SAME)
        assert served.answering.ignored == {}


@pytest.mark.parametrize("more", OTHER)
async def test_parameters_that_would_change_what_is_sampled_are_refused_or_counted(rendering: Rendering, more: dict[str, Any]) -> None:
    name = {"extra_body": next(iter(more.get("extra_body", {"": 0}))), "logprobs": "top_logprobs"}.get(next(iter(more)), next(iter(more)))
    async with serve(rendering, Says(rendering, "1"), bounds=Bounds(others="refuse")) as served:
        with pytest.raises(openai.BadRequestError, match=f"{name} is set by the training run") as error:
            await served.ask("a", **more)
        assert error.value.param == name and error.value.code == "unsupported_parameter"
    async with serve(rendering, Says(rendering, "1", "2")) as served:
        await served.ask("a", **more)
        await served.ask("b", **more)
        assert served.answering.ignored == {name: 2}


async def test_more_than_one_choice_is_never_served(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering)) as served:
        with pytest.raises(openai.BadRequestError, match="n '2' is not served here"):
            await served.ask("a", n=2)


async def test_models_are_listed(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering)) as served:
        assert [m.id async for m in served.client.models.list()] == ["policy"]


FUNCTION: Any = {"type": "function", "name": "add", "description": "adds", "parameters": TOOL["function"]["parameters"], "strict": None}


async def test_responses_hold_a_conversation_with_tools_in_one_segment(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, f"I add.{CALL}", "3", "4")) as served:
        more = {"model": "any", "instructions": "be brief", "tools": [FUNCTION]}
        first = await served.client.responses.create(input="1+2", **more)
        assert first.status == "completed" and first.output_text == "I add." and [o.type for o in first.output] == ["message", "function_call"]
        call = first.output[1]
        assert (call.name, call.arguments) == ("add", '{"a":  1, "b": [2]}')
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        second = await served.client.responses.create(input=[output], previous_response_id=first.id, **more)
        assert second.output_text == "3" and second.usage.output_tokens == 2
        items = [spoken("1+2"), *first.output, output, *second.output, spoken("and?")]  # without ids, as agents do that keep their own history
        third = await served.client.responses.create(input=items, **more)
        assert third.output_text == "4"
        (segment,) = served.segments
        assert len(segment.turns) == 3
        assert served.text(segment).endswith(f"user: 1+2\nassistant: I add.{CALL}<eos>\ntool: 3\nassistant: 3<eos>\nuser: and?\nassistant: 4<eos>")


async def test_both_apis_speak_of_one_conversation(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, "1", "2")) as served:
        first = await served.client.responses.create(model="any", input="a")
        await served.ask("a", {"role": "assistant", "content": first.output_text}, "b")
        assert [len(s.turns) for s in served.segments] == [2]


@pytest.mark.parametrize("text", ["7 and some more of it that is longer than one event", "", "so…", f"I add.{CALL}", CALL])
async def test_a_response_s_stream_says_what_the_whole_one_says(rendering: Rendering, text: str) -> None:
    async with serve(rendering, Says(rendering, text, text)) as served:
        whole = await served.client.responses.create(model="any", input="a", tools=[FUNCTION])
        async with served.client.responses.stream(model="any", input="a", tools=[FUNCTION]) as stream:
            events = [event async for event in stream]
            parts = events[-1].response
        assert [e.sequence_number for e in events] == sorted(e.sequence_number for e in events)
        assert events[-1].type == ("response.incomplete" if text.endswith("…") else "response.completed")
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
        assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == "".join(
            o.arguments for o in whole.output if o.type == "function_call"
        )
        assert [o.type for o in whole.output] == [o.type for o in parts.output]
        assert whole.status == parts.status == ("incomplete" if text.endswith("…") else "completed") and whole.usage == parts.usage


async def test_a_response_that_was_not_kept_or_never_was_cannot_be_followed(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, "1")) as served:
        first = await served.client.responses.create(model="any", input="a", store=False)
        for unknown in (first.id, "resp_nobody"):
            with pytest.raises(openai.BadRequestError) as error:
                await served.client.responses.create(model="any", input="b", previous_response_id=unknown)
            assert error.value.code == "previous_response_not_found"
