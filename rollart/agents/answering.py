"""Answers the requests of one attempt: renders, keeps to its budget, samples and records. Knows neither HTTP nor an API's JSON."""

from __future__ import annotations

import array
import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollart.agents.errors import ApiError, bad_request
from rollart.agents.messages import Message, beginnings
from rollart.agents.recording import Opening, Point, Recording
from rollart.agents.rendering import Rendering
from rollart.agents.requests import Answer, Ask
from rollart.agents.stop_strings import cut, first_tokens
from rollart.agents.tool_calls import ToolCall, ToolFormat
from rollart.control.seeds import request_seed
from rollart.types import Attempt, GenerateRequest, GenerateResult, Outcome, SamplingTransform

__all__ = ["Answering", "Budget"]

SHORT = 32_768
"""Characters of a conversation that are rendered and encoded in the event loop; a longer one has a thread."""

NAMES = 32
"""Ignored parameters that are counted by name."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Answers that an attempt may have, tokens of one, and tokens of the whole trajectory, all segments with their prompts together."""

    max_turns: int
    max_new_tokens: int
    max_tokens: int


class Answering:
    """The policy as one attempt meets it. `name` begins the names of its requests at the engines.

    `refused` says what the last request was refused for, if it was over the budget; `failure` is what an engine's failure raised, upon which
    `broken` is set: nothing is answered any more.
    """

    def __init__(
        self, attempt: Attempt, name: str, rendering: Rendering, tool_format: ToolFormat, transform: SamplingTransform, budget: Budget,
        run_seed: int, generate: Callable[[GenerateRequest], Awaitable[GenerateResult]], tell: Callable[[str], None] = lambda doing: None,
    ) -> None:  # fmt: skip
        self.attempt, self.rendering, self.recording = attempt, rendering, Recording(transform)
        self.refused: Outcome | None = None
        self.failure: Exception | None = None
        self.ended = False
        self.broken = asyncio.Event()
        self.texts: list[str] = []
        self.ignored: Counter[str] = Counter()
        self.seconds = 0.0
        self._name, self._format, self._budget = name, tool_format, budget
        self._run_seed, self._generate, self._tell = run_seed, generate, tell
        self._held: dict[int, int] = {}
        self._asked = 0
        self._draws: dict[str, set[int]] = {}
        self._freed = asyncio.Event()

    @property
    def transform(self) -> SamplingTransform:
        """How every token is sampled."""
        return self.recording.transform

    def end(self) -> None:
        """Nothing is recorded any more: what was is the trajectory, and a request in flight may have its answer just before it is cancelled."""
        self.ended = True
        self._freed.set()

    def count_ignored(self, parameter: str) -> None:
        """Counts a parameter that a request had and that changes nothing; of many names only so many are told apart."""
        self.ignored[parameter if parameter in self.ignored or len(self.ignored) < NAMES else "others"] += 1

    async def answer(self, ask: Ask) -> Answer:
        """The policy's answer, recorded. ApiError; cancelled, it leaves nothing behind, and the same request draws the same answer again."""
        names = beginnings(ask.tools, ask.messages)
        if sum(len(m.text) for m in ask.messages) > SHORT:
            point, added = await asyncio.to_thread(self._rendered, ask, names)
        else:
            point, added = self._rendered(ask, names)
        number, opening, most = await self._admitted(point, added, ask)
        digest = hashlib.sha256(array.array("q", opening.prompt).tobytes()).hexdigest()
        drawn = self._draws.setdefault(digest, set())
        draw = next(n for n in range(len(drawn) + 1) if n not in drawn)
        drawn.add(draw)
        recorded = False
        try:
            result = await self._sampled(number, opening, most, request_seed(self._run_seed, self.attempt, digest, draw))
            answer = self._record(ask, opening, result, hashlib.sha256(f"{digest}/{draw}".encode()).hexdigest()[:32])
            recorded = True
            return answer
        finally:
            if not recorded:
                drawn.discard(draw)
                if not drawn:
                    self._draws.pop(digest, None)
            self.recording.close(opening)
            del self._held[number]
            self._freed.set()
            self._tell(f"in run, after request {number}")

    def _rendered(self, ask: Ask, names: list[str]) -> tuple[Point | None, list[int]]:
        """Where the answer belongs, and the ids that come before it there: after a point those of the new messages alone, else all of them.

        Responses of ours are rendered as they were sampled. A template that changes what it said before (it leaves out reasoning, or trims)
        has nothing that goes on from there, and its whole text begins a segment.
        """
        as_sampled = [
            m if (text := self.recording.text_of(n)) is None else Message("assistant", text) for m, n in zip(ask.messages, names, strict=True)
        ]
        whole = self.rendering.text(as_sampled, ask.tools, self._format)
        if (found := self.recording.find(names)) is not None:
            number, point = found
            before = self.rendering.text(as_sampled[:number], ask.tools, self._format) + point.text
            if whole.startswith(before):
                return point, self.rendering.going_on(whole[len(before) :], point.last)
        ids = self.rendering.opening(whole)
        if not ids:
            raise bad_request("the messages make an empty prompt", "messages")
        return None, ids

    async def _admitted(self, point: Point | None, added: list[int], ask: Ask) -> tuple[int, Opening, int]:
        """The request's number, a place for its answer, and the tokens that this may have; waits while requests in flight hold what it needs."""
        wanted = min(self._budget.max_new_tokens, ask.max_tokens or self._budget.max_new_tokens)
        while True:
            if self.failure is not None:
                raise ApiError(503, f"the attempt has failed: {self.failure}")
            self._refuse_ended()
            opening = self.recording.open(point, added)
            room = self._budget.max_tokens - len(self.recording) - sum(self._held.values()) - opening.cost
            full = sum(len(s.turns) for s in self.recording.segments) + len(self._held) >= self._budget.max_turns
            if not full and (room >= wanted or (room >= 1 and not self._held)):
                number, self._asked = self._asked, self._asked + 1
                most = min(wanted, room)
                self._held[number] = opening.cost + most
                return number, opening, most
            self.recording.close(opening)
            if not self._held:
                raise self._over(full, opening)
            self._freed.clear()
            await self._freed.wait()

    def _over(self, full: bool, opening: Opening) -> ApiError:
        """The error of a request that is over the budget, for good."""
        if full:
            self.refused = "truncated"
            return bad_request(f"this attempt may have {self._budget.max_turns} responses, and has had them", code="max_turns_exceeded")
        self.refused = "over_length"
        return bad_request(
            f"this attempt's maximum context length is {self._budget.max_tokens} tokens over all of its conversations, of which "
            f"{len(self.recording)} are used; your messages have {len(opening.prompt)} tokens, {opening.cost} of them new",
            "messages", "context_length_exceeded",
        )  # fmt: skip

    async def _sampled(self, number: int, opening: Opening, most: int, seed: int) -> GenerateResult:
        request = GenerateRequest(
            f"{self._name}/{number}", opening.prompt, most, self.transform, self.rendering.vocabulary.eos_ids, seed=seed,
            return_kept=self.transform.is_cut and self.attempt.episode.purpose == "train",
        )  # fmt: skip
        started = time.perf_counter()
        try:
            result = await self._generate(request)
            if result.finish_reason == "abort":
                raise RuntimeError(f"the engine aborted request {number} of {self.attempt}")
        except Exception as error:
            self._break(error)
            raise ApiError(503, f"no engine answered: {error}") from error
        finally:
            self.seconds += time.perf_counter() - started
        return result

    def _record(self, ask: Ask, opening: Opening, result: GenerateResult, unique: str) -> Answer:
        self._refuse_ended()
        vocabulary = self.rendering.vocabulary

        def decode(tokens: int) -> str:
            return vocabulary.decode([i for i in result.ids[:tokens] if i not in vocabulary.eos_ids])

        tokens, told = cut(decode, len(result.ids), ask.stop)
        text = decode(tokens)
        if told is not None:  # the rest was sampled too, but nobody will ever have seen it
            result = first_tokens(result, tokens)
        said, calls = self._format.parse(text if told is None else told) if ask.tools and ask.may_call else (text if told is None else told, [])
        named = tuple(ToolCall(f"call_{unique}{n}", *call) for n, call in enumerate(calls))
        reply = Message("assistant", said, named)
        prompt = len(opening.prompt)
        try:
            self.recording.record(opening, result, beginnings(ask.tools, [*ask.messages, reply])[-1], text)
        except ValueError as error:  # an engine's log-probabilities that can't be trained on
            self._break(error)
            raise ApiError(502, f"an engine's answer can't be recorded: {error}") from error
        self.refused = None
        self.texts.append(text)
        spelled = tuple((vocabulary.spelled(i), p) for i, p in zip(result.ids, result.logprobs, strict=True))
        return Answer(unique, reply, result.finish_reason, prompt, len(result.ids), result.cached_tokens, spelled)

    def _refuse_ended(self) -> None:
        if self.ended:
            raise ApiError(404, "the attempt has ended", code="attempt_ended")

    def _break(self, error: Exception) -> None:
        self.failure = error
        self.broken.set()
        self._freed.set()
