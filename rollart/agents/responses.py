"""OpenAI's responses: their JSON to a request, and an answer to their JSON, whole or as events. Samples and sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollart.agents.chat import ChatMessage, FunctionOfTool, Part, Tool, pieces_of, text_of, tool_form
from rollart.agents.errors import ApiError
from rollart.agents.messages import Message
from rollart.agents.requests import Answer, Ask
from rollart.agents.tool_calls import ToolCall

__all__ = ["ResponsesRequest", "Stored", "events", "response"]


class FunctionCall(BaseModel):
    """A call that the policy made before."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(BaseModel):
    """What came of one."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class MessageItem(ChatMessage):
    type: Literal["message"] = "message"


class Reasoning(BaseModel):
    """Of other models' making; it says nothing here."""

    type: Literal["reasoning"]


Item = Annotated[FunctionCall | FunctionCallOutput | Reasoning | MessageItem, Field(union_mode="left_to_right")]


class ToolOfResponses(FunctionOfTool):
    """A tool that the agent offers: in this API its function's fields are its own."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]

    @property
    def form(self) -> dict[str, Any]:
        function = self.model_dump(exclude={"type"})
        return tool_form(Tool(type="function", function=FunctionOfTool(**function)))


class ResponsesRequest(BaseModel):
    """The fields that are heeded."""

    input: str | list[Item]
    model: str = "policy"
    instructions: str | None = None
    tools: list[ToolOfResponses] | None = None
    tool_choice: Any = None
    stream: bool | None = False
    store: bool | None = True
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None

    def ask(self, before: tuple[Message, ...]) -> Ask:
        """What is asked, after the messages `before` of earlier responses. ApiError for what is too much."""
        system = (Message("system", self.instructions),) if self.instructions else ()
        tools = tuple(t.form for t in self.tools or ())
        return Ask((*system, *before, *self.messages), tools, self.tool_choice != "none", self.max_output_tokens)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The input alone, as messages: calls belong to the assistant's message that they follow."""
        if isinstance(self.input, str):
            return (Message("user", self.input),)
        found: list[Message] = []
        for item in self.input:
            if isinstance(item, FunctionCall):
                call = ToolCall(item.call_id, item.name, item.arguments)
                if found and found[-1].role == "assistant":
                    found[-1] = replace(found[-1], calls=(*found[-1].calls, call))
                else:
                    found.append(Message("assistant", "", (call,)))
            elif isinstance(item, FunctionCallOutput):
                output = item.output if isinstance(item.output, str) else text_of(item.output)
                found.append(Message("tool", output, call_id=item.call_id))
            elif isinstance(item, MessageItem):
                found.append(item.message)
        return tuple(found)


class Stored:
    """The conversations of an attempt's responses, by their ids, without instructions."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Message, ...]] = {}

    def before(self, request: ResponsesRequest) -> tuple[Message, ...]:
        """The messages up to the response that `request` follows; ApiError if there is none of that id."""
        if request.previous_response_id is None:
            return ()
        if (found := self._kept.get(request.previous_response_id)) is None:
            raise ApiError(
                400, f"there is no response {request.previous_response_id[:80]!r} in this attempt", code="previous_response_not_found",
                param="previous_response_id",
            )  # fmt: skip
        return found

    def keep(self, request: ResponsesRequest, before: tuple[Message, ...], answer: Answer) -> None:
        """Keeps what `answer` ends, unless the agent wants that not."""
        if request.store is not False:
            self._kept[f"resp_{answer.id}"] = (*before, *request.messages, answer.message)


def response(answer: Answer, request: ResponsesRequest, created: int) -> dict[str, Any]:
    """The whole answer."""
    cut_off = answer.finish_reason == "length"
    return {
        **_head(answer, request, created), "status": "incomplete" if cut_off else "completed", "output": _output(answer),
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None, "usage": _usage(answer),
    }  # fmt: skip


def events(answer: Answer, request: ResponsesRequest, created: int) -> Iterator[dict[str, Any]]:
    """The same as the events of a stream, each with its `type`."""
    for number, event in enumerate(_events(answer, request, created)):
        yield {**event, "sequence_number": number}


def _events(answer: Answer, request: ResponsesRequest, created: int) -> Iterator[dict[str, Any]]:
    begun = {**_head(answer, request, created), "status": "in_progress", "output": [], "incomplete_details": None, "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(_output(answer)):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part, empty = item["content"][0], {**item["content"][0], "text": ""}
            yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "status": "in_progress", "content": []}}
            yield {"type": "response.content_part.added", **at, "content_index": 0, "part": empty}
            for piece in pieces_of(part["text"]):
                yield {"type": "response.output_text.delta", **at, "content_index": 0, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **at, "content_index": 0, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "content_index": 0, "part": part}
        else:
            yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "status": "in_progress", "arguments": ""}}
            for piece in pieces_of(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **at, "delta": piece}
            yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    whole = response(answer, request, created)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _head(answer: Answer, request: ResponsesRequest, created: int) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.id}", "object": "response", "created_at": created, "model": request.model, "error": None,
        "instructions": request.instructions, "metadata": {}, "parallel_tool_calls": True, "temperature": None, "top_p": None,
        "tool_choice": request.tool_choice if isinstance(request.tool_choice, str) else "auto",
        "tools": [t.model_dump(exclude_none=True) for t in request.tools or ()], "max_output_tokens": request.max_output_tokens,
        "previous_response_id": request.previous_response_id,
    }  # fmt: skip


def _output(answer: Answer) -> list[dict[str, Any]]:
    message, status = answer.message, "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.text or not message.calls:
        content = [{"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}]
        items.append({"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status, "content": content})
    for n, call in enumerate(message.calls):
        items.append(
            {
                "id": f"fc_{answer.id}{n}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return items


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.tokens, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": answer.prompt_tokens + answer.tokens,
    }  # fmt: skip
