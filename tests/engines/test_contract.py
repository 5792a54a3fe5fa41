"""What any engine must do over SGLang's HTTP API, whichever is behind the URL (see conftest): sampling, versions, prefixes, errors."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch

from rollart.engines.client import EngineClient, EngineLoad, message_of
from rollart.engines.errors import EngineRefused
from rollart.types import GenerateRequest, SamplingTransform
from storage.version import Version
from tests.engines.conftest import KIND, SWAPS


def embedded_alone(reason: str) -> pytest.MarkDecorator:
    """What the embedded engine does beyond the protocol that SGLang's servers keep."""
    return pytest.mark.skipif(KIND != "embedded", reason=reason)


@pytest.mark.parametrize("length", [1, 7, 60, 300])
async def test_greedy_tokens_are_those_of_transformers(served, wire, tiny, length):
    prompt = tiny.prompt(length, seed=length)
    reply = await wire.generate(prompt, 12)
    assert reply["output_ids"] == tiny.greedy(served.models[0], prompt, 12)
    meta = reply["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["finish_reason"]["type"]) == (length, 12, "length")


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
async def test_logprobs_are_those_of_a_plain_forward_at_the_same_temperature(served, wire, tiny, logprobs, temperature):
    prompt = tiny.prompt(40)
    reply = await wire.generate(prompt, 20, temperature=temperature, sampling_seed=5)
    expected = tiny.logprobs(served.models[0], prompt, reply["output_ids"], temperature)
    assert logprobs(reply) == pytest.approx(expected, abs=1e-5)
    assert [entry[1] for entry in reply["meta_info"]["output_token_logprobs"]] == reply["output_ids"]


@embedded_alone("SGLang heeds seeds with --enable-deterministic-inference, which none of its attention backends has on a CPU")
async def test_a_seed_gives_the_same_tokens_alone_and_among_others(wire, tiny, logprobs):
    prompts = [tiny.prompt(10 + 7 * i, seed=i) for i in range(32)]

    async def one(i: int):
        return await wire.generate(prompts[i], 16, temperature=1.0, sampling_seed=1000 + i)

    together = await asyncio.gather(*(one(i) for i in range(32)))
    await wire.flush()
    for i in (0, 9, 31):
        alone = await one(i)
        assert alone["output_ids"] == together[i]["output_ids"]
        assert logprobs(alone) == pytest.approx(logprobs(together[i]), abs=1e-4)
    assert len({tuple(r["output_ids"]) for r in together}) == 32


async def test_members_with_one_prompt_and_different_seeds_differ(wire, tiny):
    prompt = tiny.prompt(50)
    replies = await asyncio.gather(*(wire.generate(prompt, 10, temperature=1.0, sampling_seed=s) for s in range(8)))
    assert len({tuple(r["output_ids"]) for r in replies}) == 8


async def test_sampling_frequencies_follow_the_softmax(served, wire, tiny):
    prompt = tiny.prompt(12, seed=3)
    expected = tiny.distribution(served.models[0], prompt, 0.7)[-1].exp().numpy().astype(np.float64)
    draws = 1200
    gate = asyncio.Semaphore(64)

    async def draw(seed: int) -> int:
        async with gate:
            return (await wire.generate(prompt, 1, temperature=0.7, sampling_seed=seed))["output_ids"][0]

    counts = np.bincount(await asyncio.gather(*(draw(s) for s in range(draws))), minlength=tiny.vocabulary)
    common = expected * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * draws
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(observed) - 1
    assert freedom > 10
    # Wilson and Hilferty's approximation of the chi-square quantile at 1 - 1e-4.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < bound


async def test_a_stop_token_ends_the_response_and_is_part_of_it(served, wire, tiny):
    prompt = tiny.prompt(20)
    free = tiny.greedy(served.models[0], prompt, 12)
    stop = free[5]
    reply = await wire.generate(prompt, 12, stop_token_ids=[stop], ignore_eos=False)  # which SGLang takes for all tokens that end
    assert reply["output_ids"] == free[: free.index(stop) + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_the_end_token_stops_unless_it_is_to_be_ignored(served, wire, tiny):
    eos = served.models[0].config.eos_token_id
    prompts = [tiny.prompt(6, seed=s) for s in range(40)]
    for ignore in (False, True):
        replies = await asyncio.gather(*(wire.generate(p, 30, temperature=1.5, sampling_seed=i, ignore_eos=ignore) for i, p in enumerate(prompts)))
        stopped = [r for r in replies if r["meta_info"]["finish_reason"]["type"] == "stop"]
        assert all(eos not in r["output_ids"][:-1] for r in replies) is not ignore
        assert bool(stopped) is not ignore
        assert all(r["output_ids"][-1] == eos for r in stopped)


async def test_the_next_turn_of_a_trajectory_starts_from_the_cache_with_equal_logprobs(served, wire, tiny, logprobs):
    ids = tiny.prompt(40)
    for turn in range(4):
        reply = await wire.generate(ids, 6, temperature=1.0, sampling_seed=turn, extra_key="a")
        # The last sampled token has no KV yet: what came before it has.
        assert (reply["meta_info"]["cached_tokens"] > 0) is (turn > 0)
        fresh = tiny.logprobs(served.models[0], ids, reply["output_ids"])
        assert logprobs(reply) == pytest.approx(fresh, abs=1e-4)
        ids = [*ids, *reply["output_ids"], *tiny.prompt(9, seed=turn)]


async def test_another_extra_key_never_shares_a_prefix(wire, tiny):
    prompt = tiny.prompt(64)
    assert (await wire.generate(prompt, 2, extra_key="0-0"))["meta_info"]["cached_tokens"] == 0
    assert (await wire.generate(prompt, 2, extra_key="0-1"))["meta_info"]["cached_tokens"] == 0
    assert (await wire.generate(prompt, 2))["meta_info"]["cached_tokens"] == 0
    assert (await wire.generate(prompt, 2, extra_key="0-0"))["meta_info"]["cached_tokens"] > 0


async def test_flushing_empties_the_prefix_cache(wire, tiny):
    prompt = tiny.prompt(64)
    await wire.generate(prompt, 2)
    assert await wire.flush() == 200
    assert (await wire.generate(prompt, 2))["meta_info"]["cached_tokens"] == 0


@embedded_alone("an update of SGLang's weights waits for the responses in flight unless it is told what to do with them")
async def test_a_swap_within_a_response_is_stamped_and_counts_from_its_token_on(served, wire, tiny, logprobs, first_of):
    prompt = tiny.prompt(30)
    await wire.generate(prompt, 2)
    _, rest = await first_of(wire.stream(prompt, 500, rid="long", sampling={"temperature": 1.0, "sampling_seed": 1}), 10)
    status, answer = await wire.update(served.folders[1], "0-1")
    assert (status, answer["success"]) == (200, True)
    assert (await wire.get("/model_info"))[1]["weight_version"] == "0-1"
    reply = await rest
    spans, ids = reply["meta_info"]["weight_versions"], reply["output_ids"]
    assert len(ids) == 500
    assert [s["version"] for s in spans] == ["0-0", "0-1"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 500
    swap = spans[1]["start"]
    assert 10 <= swap < 500
    old, new = (tiny.logprobs(m, prompt, ids) for m in served.models)
    assert logprobs(reply)[:swap] == pytest.approx(old[:swap], abs=1e-4)
    assert logprobs(reply)[swap:] == pytest.approx(new[swap:], abs=1e-4)
    assert np.abs(np.array(old) - new)[swap:].max() > 0.1


@pytest.mark.parametrize("swap", SWAPS)
async def test_a_response_that_a_swap_meets_goes_on_to_its_end_and_each_token_is_of_the_version_that_it_names(served, tiny, logprobs, swap):
    prompt = tiny.prompt(30)
    request = GenerateRequest(f"long-{swap}", tuple(prompt), 400, SamplingTransform(temperature=1.0), seed=1, extra_key="0-0")
    begun = asyncio.Event()
    async with EngineClient() as client:
        running = asyncio.create_task(client.generate(served.url, request, lambda _: begun.set()))
        await begun.wait()
        await client.update_weights(served.url, str(served.folders[1]), "0-1", swap)
        assert await client.model_version(served.url) == "0-1"
        result = await running
    assert result.finish_reason == "stop" or (result.finish_reason, len(result.ids)) == ("length", 400)
    swapped = result.versions.index(Version(0, 1))
    assert set(result.versions[:swapped]) == {Version(0, 0)} and set(result.versions[swapped:]) == {Version(0, 1)}
    old, new = (tiny.logprobs(m, prompt, result.ids) for m in served.models)
    assert result.logprobs[:swapped] == pytest.approx(old[:swapped], abs=1e-4)
    apart = np.abs(np.array(result.logprobs) - new)[swapped:].max()
    if swap == "in_place" and KIND == "sglang":
        assert apart > 1e-2  # from KV of the old weights, which the new ones would not have computed
    else:
        assert apart < 1e-4
    assert np.abs(np.array(old) - new)[swapped:].max() > 0.1


async def test_a_failed_update_leaves_an_engine_that_goes_on(served, wire, tiny, tmp_path):
    async with EngineClient() as client:
        for swap in SWAPS:
            with pytest.raises(EngineRefused):
                await client.update_weights(served.url, str(tmp_path), "0-9", swap)
    reply = await wire.generate(tiny.prompt(20), 8)
    assert (reply["output_ids"], reply["meta_info"]["weight_version"]) == (tiny.greedy(served.models[0], tiny.prompt(20), 8), "0-0")


async def test_no_prefix_outlives_the_weights_that_computed_it(served, wire, tiny):
    prompt = tiny.prompt(64)
    await wire.generate(prompt, 4)
    assert (await wire.generate(prompt, 4))["meta_info"]["cached_tokens"] > 0
    async with EngineClient() as client:
        await client.update_weights(served.url, str(served.folders[1]), "0-1", SWAPS[0])
    reply = await wire.generate(prompt, 12)
    assert (reply["meta_info"]["cached_tokens"], reply["meta_info"]["weight_version"]) == (0, "0-1")
    assert reply["output_ids"] == tiny.greedy(served.models[1], prompt, 12)


async def test_a_folder_without_weights_is_refused_and_changes_nothing(served, wire, tiny, tmp_path):
    prompt = tiny.prompt(20)
    status, answer = await wire.update(tmp_path / "nowhere", "0-9")
    assert (status, answer["success"]) == (400, False)
    reply = await wire.generate(prompt, 8)
    assert reply["meta_info"]["weight_version"] == "0-0"
    assert reply["output_ids"] == tiny.greedy(served.models[0], prompt, 8)


@pytest.mark.parametrize("body", [{"rid": "named"}, {"rid": "", "abort_all": True}])
async def test_an_abort_by_name_or_of_all_returns_what_there_is(served, wire, tiny, logprobs, first_of, body):
    prompt = tiny.prompt(30)
    _, rest = await first_of(wire.stream(prompt, 1900, rid=body["rid"] or "any", sampling={"temperature": 0}), 5)
    assert (await wire.post("/abort_request", body))[0] == 200
    reply = await rest
    n = len(reply["output_ids"])
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 5 <= n < 1900
    assert n == len(logprobs(reply)) == reply["meta_info"]["weight_versions"][-1]["end"]
    assert reply["output_ids"] == tiny.greedy(served.models[0], prompt, n)


async def test_an_abort_of_another_name_or_of_none_ends_nothing(wire, tiny):
    running = asyncio.create_task(wire.generate(tiny.prompt(30), 200, rid="job-1"))
    await wire.post("/abort_request", {"rid": "other"})
    await wire.post("/abort_request", {"rid": "job"})
    await wire.post("/abort_request", {"rid": ""})
    reply = await running
    assert (reply["meta_info"]["id"], reply["meta_info"]["finish_reason"]["type"]) == ("job-1", "length")


async def test_a_pause_in_place_stops_the_tokens_and_continuing_changes_none(served, wire, tiny, first_of):
    prompt = tiny.prompt(25)
    _, rest = await first_of(wire.stream(prompt, 120, sampling={"temperature": 0}), 5)
    await wire.post("/pause_generation", {"mode": "in_place"})
    before = (await wire.get("/v1/loads"))[1]
    late = asyncio.create_task(wire.generate(tiny.prompt(8), 3))
    await asyncio.sleep(0.05)
    assert (await wire.get("/v1/loads"))[1].get("generated_tokens") == before.get("generated_tokens")
    assert not late.done() and not rest.done()
    await wire.post("/continue_generation", {})
    assert len((await late)["output_ids"]) == 3
    assert (await rest)["output_ids"] == tiny.greedy(served.models[0], prompt, 120)


async def test_a_pause_that_retracts_resumes_with_equal_tokens(served, wire, tiny, first_of):
    prompt = tiny.prompt(25)
    _, rest = await first_of(wire.stream(prompt, 120, sampling={"temperature": 0}), 5)
    await wire.post("/pause_generation", {"mode": "retract"})
    await wire.post("/continue_generation", {})
    assert (await rest)["output_ids"] == tiny.greedy(served.models[0], prompt, 120)


async def test_a_pause_by_default_aborts(wire, tiny, first_of):
    _, rest = await first_of(wire.stream(tiny.prompt(25), 1900, sampling={"temperature": 0}), 5)
    await wire.post("/pause_generation", {})
    assert (await rest)["meta_info"]["finish_reason"]["type"] == "abort"
    await wire.post("/continue_generation", {})


async def test_a_caller_that_hangs_up_aborts_its_request(wire, tiny):
    async for _ in wire.stream(tiny.prompt(25), 1900, sampling={"temperature": 0}):
        break
    for _ in range(200):
        loads = (await wire.get("/v1/loads"))[1]["loads"][0]
        if loads["num_running_reqs"] == 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"the request still runs: {loads}")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": "many"}}, "max_new_tokens" if KIND == "embedded" else "many"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"input_ids": [5], "rid": 7}, "rid"),
        ({"input_ids": [5] * 3000}, "3000"),
    ],
)
async def test_a_wrong_body_is_refused_by_the_name_of_the_field(wire, body, field):
    status, answer = await wire.post("/generate", body)
    assert status == 400
    assert field in message_of(json.dumps(answer))


async def test_health_and_server_info_answer(wire):
    for path in ("/health", "/health_generate", "/model_info", "/server_info", "/v1/loads", "/metrics"):
        assert (await wire.get(path))[0] == 200


async def test_the_client_reads_the_load_and_the_tokens_that_were_sampled(wire, served, tiny):
    async with EngineClient() as client:
        before = await client.generated_tokens(served.url)
        await wire.generate(tiny.prompt(5), 7)
        for _ in range(100):  # SGLang counts a response once it has answered
            if await client.generated_tokens(served.url) == before + 7:
                break
            await asyncio.sleep(0.02)
        assert await client.generated_tokens(served.url) == before + 7
        assert await client.load(served.url) == EngineLoad(0, 0)


async def test_a_response_tells_how_long_its_engine_took(served, tiny):
    request = GenerateRequest("timed", tuple(tiny.prompt(8)), 30, SamplingTransform(temperature=0.0))
    async with EngineClient() as client:
        service = (await client.generate(served.url, request)).service
    assert service is not None
    assert service.queue >= 0 and service.prefill >= 0 and service.decode > 0


async def test_top_k_keeps_the_best_and_reports_their_logprobs(served, wire, tiny, logprobs):
    prompt = tiny.prompt(15)
    rows = tiny.distribution(served.models[0], prompt)[-1]
    kept = torch.topk(rows, 3)
    replies = await asyncio.gather(*(wire.generate(prompt, 1, temperature=1.0, top_k=3, sampling_seed=s) for s in range(40)))
    assert {r["output_ids"][0] for r in replies} == set(kept.indices.tolist())
    # SGLang's are over the whole vocabulary, cut or not. Nothing that was cut is trained on.
    values = kept.values if KIND == "sglang" else kept.values.log_softmax(0)
    by_id = dict(zip(kept.indices.tolist(), values.tolist(), strict=True))
    for reply in replies:
        assert logprobs(reply)[0] == pytest.approx(by_id[reply["output_ids"][0]], abs=1e-4)
