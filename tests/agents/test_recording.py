"""What an OpenAI client is answered with stands as segments: the ids sampled, never encoded again, each trained on once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from rollart.agents.answering import Budget
from rollart.agents.messages import Message
from rollart.agents.rendering import Rendering
from rollart.agents.requests import Ask
from rollart.engines.client import EngineClient
from rollart.types import NOT_SAMPLED, GenerateRequest, GenerateResult, SamplingTransform, Version
from tests.agents.serving import TEMPERATURE, Says, Served, rescored, save_policy, serve


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def test_what_is_recorded_is_what_the_engine_sampled_and_a_plain_forward_pass_says_the_same(served: Served, policy: Path) -> None:
    first = await served.ask("hello", logprobs=True)
    message = first.choices[0].message
    second = await served.ask("hello", message, "again", logprobs=True)
    (segment,) = served.segments
    assert len(segment.turns) == 2 and segment.sampled == first.usage.completion_tokens + second.usage.completion_tokens
    assert rescored(policy, segment) < 1e-4
    told = [entry.logprob for answer in (first, second) for entry in answer.choices[0].logprobs.content]
    assert told == [p for p, m in zip(segment.logprobs, segment.mask, strict=True) if m]
    assert {v for v, m in zip(segment.versions, segment.mask, strict=True) if m} == {0}
    assert {v for v, m in zip(segment.versions, segment.mask, strict=True) if not m} == {NOT_SAMPLED}
    decoded = served.answering.rendering.vocabulary.decode(segment.ids[segment.turns[1].start : segment.turns[1].end])
    assert decoded == second.choices[0].message.content
    assert (first.usage.prompt_tokens, second.usage.prompt_tokens) == tuple(t.start for t in segment.turns)


async def test_a_conversation_goes_on_from_its_ids_even_where_its_text_would_be_encoded_otherwise(rendering: Rendering) -> None:
    vocabulary = rendering.vocabulary
    split = [vocabulary.encode(c)[0] for c in "system"]  # as text it is one token
    assert len(vocabulary.encode("system")) == 1

    async def generate(request: GenerateRequest) -> GenerateResult:
        n = len(split)
        return GenerateResult(request.rid, tuple(split), (-0.5,) * n, (Version(0, 2),) * n, "length", len(request.input_ids))

    async with serve(rendering, generate) as served:
        answer = await served.ask("a")
        assert answer.choices[0].message.content == "system" and answer.choices[0].finish_reason == "length"
        await served.ask("a", assistant("system"), "b")
        (segment,) = served.segments
        start, end = segment.turns[0].start, segment.turns[0].end
        assert segment.ids[start:end] == split
        assert served.text(segment) == "user: a\nassistant: system<eos>\nuser: b\nassistant: system"
        assert segment.mask == [0] * start + [1] * len(split) + [0] * (segment.turns[1].start - end) + [1] * len(split)


async def test_a_conversation_that_was_changed_begins_a_segment_of_its_own(rendering: Rendering) -> None:
    says = Says(rendering, "<think>hm</think>7", "8", "9", "10")
    async with serve(rendering, says) as served:
        await served.ask("a")
        await served.ask("a", assistant("7"), "b")  # the agent left the reasoning out
        await served.ask("a", assistant("7"), "b", assistant("8"), "c")  # and goes on with that
        await served.ask("summary: 7 and 8", "d")  # and compacts it all
        texts = [served.text(s) for s in served.segments]
        assert texts == [
            "user: a\nassistant: <think>hm</think>7<eos>",
            "user: a\nassistant: 7<eos>\nuser: b\nassistant: 8<eos>\nuser: c\nassistant: 9<eos>",
            "user: summary: 7 and 8\nuser: d\nassistant: 10<eos>",
        ]
        assert [len(s.turns) for s in served.segments] == [1, 2, 1]


async def test_another_system_message_or_other_tools_are_another_conversation(rendering: Rendering) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    async with serve(rendering, Says(rendering, *"123")) as served:
        await served.ask("a")
        await served.ask({"role": "system", "content": "s"}, "a", assistant("1"), "b")
        await served.ask("a", assistant("1"), "b", tools=[tool])
        assert [len(s.turns) for s in served.segments] == [1, 1, 1]


async def test_a_repeated_request_stands_beside_the_first_and_whichever_answer_is_used_is_gone_on_from(rendering: Rendering) -> None:
    says = Says(rendering, "1", "2", "3", "4", "5")
    async with serve(rendering, says) as served:
        await served.ask("a")
        used = await served.ask("a", assistant("1"), "b")
        again = await served.ask("a", assistant("1"), "b")  # again: the answer 2 may have been thrown away, or kept beside this one
        await served.ask("a", assistant("1"), "b", assistant("3"), "c")
        await served.ask("a", assistant("1"), "b", assistant("2"), "c")
        first, second = served.segments
        assert served.text(first) == "user: a\nassistant: 1<eos>\nuser: b\nassistant: 2<eos>\nuser: c\nassistant: 5<eos>"
        assert served.text(second) == "user: a\nassistant: 1<eos>\nuser: b\nassistant: 3<eos>\nuser: c\nassistant: 4<eos>"
        shared = len(first.ids[: first.turns[0].end])
        assert second.ids[:shared] == first.ids[:shared] and sum(second.mask[:shared]) == 0  # trained on in the first alone
        assert first.sampled + second.sampled == 10
        seeds = [r.seed for r in says.asked]
        assert len(set(seeds)) == 5 and used.id != again.id
        assert says.asked[1].input_ids == says.asked[2].input_ids


async def test_an_answer_that_the_agent_did_not_wait_for_leaves_nothing_and_asked_again_is_the_same_draw(rendering: Rendering) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()
    says = Says(rendering, "1", "2")
    requests: list[GenerateRequest] = []

    async def generate(request: GenerateRequest) -> GenerateResult:
        requests.append(request)
        if len(requests) == 1:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                gone.set()
        return await says(request)

    async with serve(rendering, generate) as served:
        waiting = asyncio.create_task(served.ask("a"))
        await asked.wait()
        waiting.cancel()
        await asyncio.wait_for(gone.wait(), 20)
        await served.ask("a")
        (segment,) = served.segments
        assert served.text(segment) == "user: a\nassistant: 1<eos>"
        assert requests[0].seed == requests[1].seed and requests[0].rid != requests[1].rid


async def test_seeds_follow_from_the_attempt_and_the_prompt_whatever_the_order(rendering: Rendering) -> None:
    seeds = []
    for order in ("ab", "ba"):
        says = Says(rendering, "1", "2")
        async with serve(rendering, says) as served:
            for text in order:
                await served.ask(text)
        seeds.append({r.input_ids: r.seed for r in says.asked})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 2


async def test_requests_in_parallel_stand_in_segments_of_their_own(rendering: Rendering) -> None:
    both = asyncio.Barrier(2)
    vocabulary = rendering.vocabulary

    async def generate(request: GenerateRequest) -> GenerateResult:
        if len(request.input_ids) > first:
            await both.wait()
        ids = (vocabulary.encode("x")[0], vocabulary.eos_ids[0])
        return GenerateResult(request.rid, ids, (-0.5, -0.5), (Version(0, 0),) * 2, "stop", len(request.input_ids))

    first = len(vocabulary.encode("user: a\nassistant: "))
    async with serve(rendering, generate) as served:
        await served.ask("a")
        await asyncio.gather(*(served.ask("a", assistant("x"), text) for text in ("left", "right")))
        assert sorted(served.text(s) for s in served.segments) == [
            "user: a\nassistant: x<eos>\nuser: left\nassistant: x<eos>", "user: a\nassistant: x<eos>\nuser: right\nassistant: x<eos>",
        ]  # fmt: skip
        assert sorted(s.sampled for s in served.segments) == [2, 4]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETS = CHATML.replace("m['content']", "(m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'])")


@pytest.mark.parametrize(("template", "segments"), [(CHATML, 1), (FORGETS, 2)])
async def test_a_template_that_forgets_reasoning_begins_a_segment_where_it_does(tmp_path: Path, template: str, segments: int) -> None:
    rendering = Rendering.of_folder(save_policy(tmp_path, template, "<|im_start|>", "<|im_end|>"))
    says = Says(rendering, "<think>hm</think>7", "8", "9")
    async with serve(rendering, says) as served:
        answer = await served.ask("a")
        assert answer.choices[0].message.content == "<think>hm</think>7"
        second = await served.ask("a", answer.choices[0].message, "b")
        await served.ask("a", answer.choices[0].message, "b", second.choices[0].message, "c")
        assert len(served.segments) == segments and len(served.segments[-1].turns) == 4 - segments
        last = served.text(served.segments[-1])
        said = "<think>hm</think>7" if segments == 1 else "7"
        assert last == (
            f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n8<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n9<|im_end|>"
        )


async def test_a_swap_in_the_middle_of_a_response_is_stamped_token_by_token(rendering: Rendering) -> None:
    ids = (*rendering.vocabulary.encode("ab"), rendering.vocabulary.eos_ids[0])

    async def generate(request: GenerateRequest) -> GenerateResult:
        return GenerateResult(request.rid, ids, (-0.5,) * 3, (Version(0, 3), Version(0, 4), Version(0, 4)), "stop", len(request.input_ids))

    async with serve(rendering, generate) as served:
        await served.ask("a")
        (segment,) = served.segments
        assert segment.versions[segment.turns[0].start :] == [3, 4, 4] and served.answering.recording.oldest == 3


async def test_new_weights_in_the_middle_of_a_real_response_leave_a_sound_segment(
    rendering: Rendering, engine: str, policy: Path, tmp_path: Path
) -> None:
    other, begun = save_policy(tmp_path / "other", seed=1), asyncio.Event()
    async with EngineClient() as client:

        async def generate(request: GenerateRequest) -> GenerateResult:
            return await client.generate(engine, request, heard=lambda so_far: begun.set())

        async with serve(rendering, generate, Budget(4, 600, 1024)) as served:
            try:
                asking = asyncio.create_task(served.ask("a"))
                await begun.wait()
                await client.update_weights(engine, str(other), "0-1")
                answer = await asking
                await served.ask("a", answer.choices[0].message, "b", max_tokens=5)
            finally:
                await client.update_weights(engine, str(policy), "0-0")
            (segment,) = served.segments
            segment.check()
            sampled = [v for v, m in zip(segment.versions, segment.mask, strict=True) if m]
            assert set(sampled) == {0, 1} and sampled == sorted(sampled)
            assert rescored(policy, segment, version=0) < 1e-4 and rescored(other, segment, version=1) < 1e-4


async def test_what_a_cut_kept_stands_with_each_recorded_token_also_where_a_stop_string_ends_the_answer(rendering: Rendering, engine: str) -> None:
    cut = SamplingTransform(TEMPERATURE, top_k=5)
    async with EngineClient() as client, serve(rendering, lambda request: client.generate(engine, request), transform=cut) as served:
        first = (await served.ask("a")).choices[0].message.content
        assert len(first) > 2
        async with serve(rendering, lambda request: client.generate(engine, request), transform=cut) as again:  # draws the same
            assert (await again.ask("a", stop=first[2])).choices[0].message.content == first[: first.index(first[2])]
            for (segment,) in (served.segments, again.segments):
                segment.check()
                assert list(segment.kept.counts) == [5] * segment.sampled and segment.sampled > 0
            assert again.segments[0].sampled < served.segments[0].sampled


async def test_an_engine_that_fails_is_told_as_a_503_and_ends_the_attempt(rendering: Rendering) -> None:
    says = Says(rendering, "1")

    async def generate(request: GenerateRequest) -> GenerateResult:
        return await says(request) if not says.asked else GenerateResult(request.rid, (), (), (), "abort", 3)

    async with serve(rendering, generate) as served:
        await served.ask("a")
        with pytest.raises(openai.InternalServerError, match="aborted request 1 of"):
            await served.ask("b")
        assert served.answering.broken.is_set()
        with pytest.raises(openai.InternalServerError, match="the attempt has failed"):
            await served.ask("a")
        (segment,) = served.segments
        segment.check()
        assert served.text(segment) == "user: a\nassistant: 1<eos>"


async def test_what_is_over_the_token_budget_is_refused_as_openai_does_and_the_rest_goes_on(rendering: Rendering) -> None:
    async with serve(rendering, Says(rendering, "1", "2", "3"), Budget(9, 4, 60)) as served:
        await served.ask("a")
        with pytest.raises(openai.BadRequestError) as error:
            await served.ask("a" * 60)
        assert error.value.code == "context_length_exceeded" and error.value.type == "invalid_request_error"
        assert served.answering.refused == "over_length"
        await served.ask("b")
        assert served.answering.refused is None and len(served.answering.recording) <= 60


async def test_the_last_response_is_cut_to_what_the_budget_leaves_and_turns_are_bounded(rendering: Rendering) -> None:
    says = Says(rendering, *"12345")
    room = len(rendering.vocabulary.encode("user: a\nassistant: ")) + 3
    async with serve(rendering, says, Budget(9, 8, room)) as served:
        await served.ask("a", max_tokens=5)
        assert says.asked[0].max_new_tokens == 3
    async with serve(rendering, says, Budget(2, 8, 999)) as served:
        await served.ask("a", max_completion_tokens=5)
        assert says.asked[1].max_new_tokens == 5
        await served.ask("b")
        with pytest.raises(openai.BadRequestError) as error:
            await served.ask("c")
        assert error.value.code == "max_turns_exceeded" and served.answering.refused == "truncated"


@pytest.mark.parametrize(("used", "left"), [(2, 10), (10, 4)])
async def test_a_request_waits_for_tokens_that_one_in_flight_may_leave(rendering: Rendering, used: int, left: int) -> None:
    free = asyncio.Event()
    started: asyncio.Queue[GenerateRequest] = asyncio.Queue()

    async def generate(request: GenerateRequest) -> GenerateResult:
        started.put_nowait(request)
        await free.wait()
        n = min(used, request.max_new_tokens)
        return GenerateResult(request.rid, (40,) * n, (-0.5,) * n, (Version(0, 0),) * n, "length", len(request.input_ids))

    prompt = len(rendering.vocabulary.encode("user: a\nassistant: "))
    async with serve(rendering, generate, Budget(9, 10, 2 * prompt + 14)) as served:
        asking = [asyncio.create_task(served.answering.answer(Ask((Message("user", text),)))) for text in "ab"]
        assert (await started.get()).max_new_tokens == 10
        await asyncio.sleep(0)  # the second has asked by now, as nothing holds it up before
        free.set()
        await asyncio.gather(*asking)
        assert (await started.get()).max_new_tokens == left  # of 14, of which the first held 10 while it ran
        assert len(served.answering.recording) == 2 * prompt + used + min(used, left)


async def test_an_answer_that_comes_after_the_end_is_not_recorded(rendering: Rendering) -> None:
    async def generate(request: GenerateRequest) -> GenerateResult:
        served.answering.end()
        return GenerateResult(request.rid, (5,), (-0.5,), (Version(0, 2),), "length", len(request.input_ids))

    async with serve(rendering, generate) as served:
        with pytest.raises(openai.NotFoundError, match="the attempt has ended"):
            await served.ask("a")
        assert served.segments == []
        with pytest.raises(openai.NotFoundError, match="the attempt has ended"):
            await served.ask("b")
