"""A response that comes in parts: what an increment keeps, what is left to ask for, and an engine killed in the middle of one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineUnreachable
from rollart.engines.response import STREAM_INTERVAL, Response
from rollart.types import FinishReason, GenerateRequest, GenerateResult, SamplingTransform, Version
from tests.engines.conftest import Tiny, running_engine, url_of

REQUEST = GenerateRequest("r", (7, 8), 5, stop_token_ids=(1,), seed=3)


def part(ids: Sequence[int], version: int = 0, finish: FinishReason = "abort", prompt: int = 2, cached: int = 0) -> GenerateResult:
    return GenerateResult("r", tuple(ids), tuple(-float(i) for i in ids), (Version(0, version),) * len(ids), finish, prompt, cached)


def test_what_was_heard_is_kept_and_the_rest_of_the_budget_goes_on() -> None:
    response = Response(REQUEST)
    response.heard(part([4]))
    response.heard(part([4, 5], cached=1))
    assert response.lost() and response.whole is None
    assert response.left == dataclasses.replace(REQUEST, rid="r/1", input_ids=(7, 8, 4, 5), max_new_tokens=3)
    whole = response.ended(part([6, 1], version=2, finish="stop", prompt=4))
    assert whole.rid == "r"
    assert (whole.ids, whole.logprobs, [v.step for v in whole.versions]) == ((4, 5, 6, 1), (-4.0, -5.0, -6.0, -1.0), [0, 0, 2, 2])
    assert (whole.finish_reason, whole.prompt_tokens, whole.cached_tokens) == ("stop", 2, 1)


def test_what_an_abort_returns_is_kept_too_and_nothing_heard_is_nothing_kept() -> None:
    response = Response(REQUEST)
    assert not response.lost() and not response.lost(part([])) and response.left == dataclasses.replace(REQUEST, rid="r/2")
    assert response.lost(part([4, 5, 6])) and response.lost(part([9], version=1, prompt=5))
    assert response.left.input_ids == (7, 8, 4, 5, 6, 9) and response.left.max_new_tokens == 1
    response.heard(part([4]))
    assert response.ended(part([2], version=1, finish="length")).ids == (4, 5, 6, 9, 2), "what was heard of the last answer is in it"


@pytest.mark.parametrize(("ids", "reason"), [([4, 1], "stop"), ([4, 5, 6, 7, 8], "length"), ([4, 5], None)])
def test_an_engine_lost_before_it_could_say_that_the_response_had_ended_changes_nothing(ids: list[int], reason: FinishReason | None) -> None:
    response = Response(REQUEST)
    assert response.lost(part(ids))
    assert (response.whole and response.whole.finish_reason) == reason


def test_only_a_response_of_several_increments_is_worth_a_stream() -> None:
    assert [Response(dataclasses.replace(REQUEST, max_new_tokens=n)).worth_streaming for n in (4, 2 * STREAM_INTERVAL, 2 * STREAM_INTERVAL + 1)] == [
        False, False, True,
    ]  # fmt: skip


@pytest.fixture
def engines(tiny: Tiny, tmp_path: Path) -> Callable[[], object]:
    """Starts an engine of the same weights each time it is called; a context manager of its process."""
    model = tiny.model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # responses are as long as they may be
    model.save_pretrained(tmp_path)
    return lambda: running_engine("--model", str(tmp_path), "--weight-version", "0-0", "--slots", "4", "--stream-interval", "8")


async def test_a_response_whose_engine_is_killed_goes_on_elsewhere_as_if_nothing_had_happened(tiny: Tiny, engines: Callable[[], object]) -> None:
    request = GenerateRequest("long", tuple(tiny.prompt(6)), 400, SamplingTransform(temperature=1.0), seed=11)
    response, increments, enough = Response(request), [], asyncio.Event()
    with engines() as one, engines() as other:  # type: ignore[attr-defined]
        first, second = url_of(one), url_of(other)

        def heard(so_far: GenerateResult) -> None:
            response.heard(so_far)
            increments.append(len(so_far.ids))
            if len(increments) == 3:
                os.kill(one.pid, signal.SIGKILL)
                enough.set()

        async with EngineClient() as client:
            undisturbed = await client.generate(second, request)
            with pytest.raises(EngineUnreachable):
                await client.generate(first, response.left, heard)
            assert enough.is_set() and 8 <= increments[0] < increments[1] < increments[2] < 400
            assert response.lost() and len(response.left.input_ids) == 6 + increments[-1]
            whole = response.ended(await client.generate(second, response.left))
    assert whole.ids == undisturbed.ids and len(whole.ids) == 400
    assert whole.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-4)
    assert whole.finish_reason == "length"


async def test_a_streamed_response_is_the_one_that_is_sent_whole(tiny: Tiny, engines: Callable[[], object]) -> None:
    request = GenerateRequest("r", tuple(tiny.prompt(6)), 100, SamplingTransform(temperature=1.0), seed=5)
    told: list[GenerateResult] = []
    with engines() as one:  # type: ignore[attr-defined]
        async with EngineClient() as client:
            url = url_of(one)
            whole, streamed = await client.generate(url, request), await client.generate(url, request, told.append)
    assert streamed.ids == whole.ids and streamed.finish_reason == whole.finish_reason and streamed.service is not None
    assert all(t.ids == whole.ids[: len(t.ids)] and t.finish_reason == "abort" for t in told) and 1 <= len(told) <= (len(whole.ids) - 1) // 8
