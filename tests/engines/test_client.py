"""The client against the real embedded engine, and against addresses where none is."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineRefused, EngineUnreachable
from rollart.types import GenerateRequest, SamplingTransform
from storage.version import Version


@pytest.fixture
async def client():
    async with EngineClient() as opened:
        yield opened


async def until_running(client: EngineClient, url: str) -> None:
    """Returns once the engine has a request in a slot."""
    for _ in range(20_000):
        if (await client.load(url)).running:
            return
        await asyncio.sleep(0.002)
    pytest.fail("the request never ran")


async def test_a_response_comes_back_with_ids_logprobs_and_versions(client, served, tiny):
    prompt = tuple(tiny.prompt(20))
    result = await client.generate(served.url, GenerateRequest("r1", prompt, 6, SamplingTransform(temperature=0.6), seed=4))
    assert result.logprobs == pytest.approx(tiny.logprobs(served.models[0], prompt, result.ids, 0.6), abs=1e-5)
    assert (result.rid, result.prompt_tokens, len(result.ids), set(result.versions)) == ("r1", 20, 6, {Version(0, 0)})


async def test_weights_are_updated_and_the_version_is_read_back(client, served):
    assert await client.model_version(served.url) == "0-0"
    await client.update_weights(served.url, str(served.folders[1]), "1-4")
    assert await client.model_version(served.url) == "1-4"


async def test_an_aborted_call_returns_what_there_is(client, served, tiny):
    request = GenerateRequest("victim", tuple(tiny.prompt(20)), 1900, stop_token_ids=())
    running = asyncio.create_task(client.generate(served.url, request))
    await until_running(client, served.url)
    await client.abort(served.url, "victim")
    result = await running
    # An end token may come first by chance of the seed; then the response is whole.
    assert result.finish_reason in ("abort", "stop")
    assert len(result.ids) == len(result.logprobs) < 1900


async def test_health_returns_where_all_is_well(client, served):
    await client.health(served.url)
    await client.health(served.url, generate=True)


async def test_a_refusal_carries_status_and_the_engines_words(client, served, tmp_path):
    with pytest.raises(EngineRefused, match="vocabulary ends at 95") as caught:
        await client.generate(served.url, GenerateRequest("r", (5000,), 4))
    assert (caught.value.status, caught.value.url) == (400, served.url)
    with pytest.raises(EngineRefused, match=r"holds no model\.safetensors"):
        await client.update_weights(served.url, str(tmp_path), "0-5")


async def test_nobody_there_is_unreachable(client):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(EngineUnreachable, match="/health"):
            await client.health(url)


async def test_an_engine_that_is_killed_in_the_middle_is_unreachable(client, tiny, tmp_path, engine_process, engine_url):
    tiny.model().save_pretrained(tmp_path)
    with engine_process("--model", str(tmp_path)) as process:
        url = engine_url(process)
        running = asyncio.create_task(client.generate(url, GenerateRequest("r", (5, 6), 2000)))
        await until_running(client, url)
        process.kill()
        with pytest.raises(EngineUnreachable):
            await running


async def test_a_late_answer_is_unreachable_and_says_how_long_it_waited(served, tiny):
    async with EngineClient(generate_seconds=0.001) as hasty:
        with pytest.raises(EngineUnreachable, match=r"longer than 0\.001 s"):
            await hasty.generate(served.url, GenerateRequest("r", tuple(tiny.prompt(400)), 1000))


async def test_aborting_no_name_is_refused_here(client, served):
    with pytest.raises(ValueError, match="abort_all"):
        await client.abort(served.url, "")
