"""OpenAI's chat completions: their JSON to a request, and an answer to their JSON, whole or as chunks. Samples and sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollart.agents.messages import Message
from rollart.agents.requests import Answer, Ask
from rollart.agents.tool_calls import ToolCall

__all__ = ["ChatRequest", "chunks", "completion"]


class Part(BaseModel):
    """A piece of a message; text alone, since the policy reads nothing else."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""


class Function(BaseModel):
    name: str
    arguments: str


class Call(BaseModel):
    """A tool call of an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    """A message as it comes in."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @property
    def message(self) -> Message:
        calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in self.tool_calls or ())
        role = "system" if self.role == "developer" else self.role
        return Message(role, text_of(self.content), calls, self.tool_call_id or "", self.name or "")


class FunctionOfTool(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that the agent offers."""

    type: Literal["function"]
    function: FunctionOfTool


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The fields that are heeded."""

    messages: list[ChatMessage]
    model: str = "policy"
    tools: list[Tool] | None = None
    tool_choice: Any = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    logprobs: bool | None = False

    @property
    def ask(self) -> Ask:
        """What is asked. ApiError for what is too much."""
        return Ask(
            tuple(m.message for m in self.messages), tuple(tool_form(t) for t in self.tools or ()), self.tool_choice != "none",
            self.max_completion_tokens or self.max_tokens, (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
        )  # fmt: skip


def text_of(content: str | list[Part] | None) -> str:
    return content if isinstance(content, str) else "".join(p.text for p in content or ())


def tool_form(tool: Tool) -> dict[str, Any]:
    """A tool as templates get it: without fields that say nothing."""
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True)}


def completion(answer: Answer, request: ChatRequest, created: int) -> dict[str, Any]:
    """The whole answer."""
    message = answer.message
    told: dict[str, Any] = {"role": "assistant", "content": message.text or (None if message.calls else ""), "refusal": None}
    if message.calls:
        told["tool_calls"] = [_call(c) for c in message.calls]
    choice = {"index": 0, "message": told, "finish_reason": _finish(answer), "logprobs": _logprobs(answer) if request.logprobs else None}
    return {**_head(answer, request, created), "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}


def chunks(answer: Answer, request: ChatRequest, created: int) -> Iterator[dict[str, Any]]:
    """The same as the events of a stream."""
    head = {**_head(answer, request, created), "object": "chat.completion.chunk"}
    usage = request.stream_options is not None and request.stream_options.include_usage
    more = {"usage": None} if usage else {}

    def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}], **more}

    yield chunk({"role": "assistant", "content": None if answer.message.calls and not answer.message.text else ""})
    pieces = list(pieces_of(answer.message.text))
    for n, piece in enumerate(pieces):
        yield chunk({"content": piece}, None, _logprobs(answer) if request.logprobs and n == 0 else None)
    if request.logprobs and not pieces:
        yield chunk({}, None, _logprobs(answer))
    for index, call in enumerate(answer.message.calls):
        opened = _call(call)
        opened["function"] = {"name": call.name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, **opened}]})
        for piece in pieces_of(call.arguments):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, _finish(answer))
    if usage:
        yield {**head, "choices": [], "usage": _usage(answer)}


PIECE = 32
"""Characters of a streamed event."""


def pieces_of(text: str) -> Iterator[str]:
    """Text in the pieces that it is streamed in."""
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def _head(answer: Answer, request: ChatRequest, created: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "created": created, "model": request.model}


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.message.calls and answer.finish_reason == "stop" else answer.finish_reason


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []} for token, logprob in answer.logprobs]
    return {"content": content, "refusal": None}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": answer.prompt_tokens + answer.tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }  # fmt: skip
