"""Drafts' weights on a generation worker: what its engine starts with, and versions that it is given as they appear."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rollart.drafts.config import HeadConfig
from rollart.drafts.folder import config_file, save_head
from rollart.drafts.head import DraftHead
from rollart.engines import draft_versions
from rollart.engines.client import EngineClient
from rollart.engines.draft_versions import DraftVersions
from rollart.engines.errors import EngineDied
from rollart.engines.host import EngineHost, EngineSettings
from rollart.engines.speculative.settings import SpeculationSettings
from storage.errors import StoreError
from storage.models.folders import model_files
from storage.version import Version
from storage.weights import WeightStore


@pytest.fixture(scope="module")
def policy(tiny, tmp_path_factory):
    """The policy's folder, and the store with its version 0-0."""
    folder, url = tmp_path_factory.mktemp("model"), str(tmp_path_factory.mktemp("weights"))
    model = tiny.model()
    WeightStore(url).publish(model.state_dict(), version=Version(0, 0)).result()
    model.config.save_pretrained(folder)
    return folder, url


@pytest.fixture
def publish(tiny, tmp_path):
    """Publishes a head of random weights, or with `of` the weights of a model, as a version of the store at `publish.url`."""

    def one(step, kept=None, config=None, of=None):
        if of is not None:
            of.save_pretrained(tmp_path / "whole")
            state, files = of.state_dict(), model_files(tmp_path / "whole")
        else:
            torch.manual_seed(step)
            head = DraftHead(config or HeadConfig.of(tiny.model().config, kept=kept))
            state, files = head.state_dict(), {"config.json": config_file(head.config)}
        WeightStore(one.url).publish(state, version=Version(0, step), files=files).result()

    one.url = str(tmp_path / "drafts")
    return one


@pytest.fixture
def hosted(policy, monkeypatch):
    """A host, with its engine, of a worker that is none of Dask's."""
    monkeypatch.setattr(draft_versions, "FOLLOW_S", 0.05)

    @asynccontextmanager
    async def start(**speculation):
        settings = EngineSettings(str(policy[0]), slots=4, max_length=128, speculation=SpeculationSettings(length=3, adaptive=False, **speculation))
        host, worker = EngineHost(settings, policy[1]), SimpleNamespace(address="inproc://", state=SimpleNamespace(total_resources={"generate": 1}))
        await host.setup(worker)
        try:
            yield host
        finally:
            await host.teardown(worker)

    return start


async def drafted(host):
    """What its engine says of its draft."""
    async with EngineClient() as client:
        return (await client._json("GET", host.url, "/v1/loads", None, 10.0))["draft_version"]


async def until(holds):
    """Waits until `holds()` is true."""
    async with asyncio.timeout(60):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)


async def drafts_with(host, version):
    return await drafted(host) == version


async def killed(host):
    """Ends its engine as the kernel would."""
    os.kill(host.pid, signal.SIGKILL)
    await host._process._process.wait()


async def generated(tiny, host, tokens=20):
    """Has the engine answer, and gives how many drafted tokens were proposed and stood."""
    await host.serve(Version(0, 0))
    prompt = tiny.prompt(10)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    async with EngineClient() as client:
        reply = await client._json("POST", host.url, "/generate", body, 30.0)
    assert reply["output_ids"] == tiny.greedy(tiny.model(), prompt, tokens)
    return reply["meta_info"]["spec_num_proposed_drafts"], reply["meta_info"]["spec_num_correct_drafts"]


async def test_a_head_that_is_not_there_yet_is_waited_for_newer_ones_follow_and_one_that_does_not_fit_is_left_out(tiny, hosted, publish, caplog):
    async def told():
        return "left out" in caplog.text

    async with hosted(draft="head", versions=publish.url, follow=True) as host:
        assert await drafted(host) == "none"
        assert await generated(tiny, host) == (0, 0)
        publish(0, kept=40)
        await until(partial(drafts_with, host, "0-0"))
        assert (await generated(tiny, host))[0] > 0
        wrong = HeadConfig.of(tiny.model().config)
        with caplog.at_level(logging.WARNING, "rollart.engines.host"):
            publish(1, config=HeadConfig.from_document({**wrong.document(), "policy_layers": 7}))
            await until(told)
        assert "version 0-1 of the draft is left out, and 0-0 stays" in caplog.text
        assert "num_hidden_layers 7 (the policy has 2)" in caplog.text
        assert await drafted(host) == "0-0"
        await killed(host)
        assert (await generated(tiny, host))[0] > 0
        assert (await drafted(host), host.restarts) == ("0-0", 1)
        publish(3, kept=12)
        await until(partial(drafts_with, host, "0-3"))


@pytest.mark.parametrize(("follow", "then"), [(False, "0-0"), (True, "0-1")])
def test_an_engine_that_is_started_again_drafts_as_before_or_with_the_newest_version_where_it_follows(publish, follow, then):
    publish(0)
    drafts = DraftVersions(SpeculationSettings("head", versions=publish.url, follow=follow), {})
    with drafts.start() as first:
        publish(1)
    with drafts.start() as second:
        assert (first[1], second[1], drafts.follows) == ("0-0", then, follow)
    drafts.close()


async def test_an_engine_that_dies_while_the_store_of_drafts_is_away_is_started_again_with_what_this_host_has(tiny, hosted, publish, tmp_path):
    publish(0)
    async with hosted(draft="head", versions=publish.url, follow=True) as host:
        (tmp_path / "drafts").rename(tmp_path / "elsewhere")
        (tmp_path / "drafts").touch()
        await killed(host)
        assert (await generated(tiny, host))[0] > 0
        assert (await drafted(host), host.restarts) == ("0-0", 1)


async def test_a_model_that_drafts_is_pulled_and_followed_alike(tiny, hosted, publish):
    publish(0, of=tiny.model(seed=7))
    async with hosted(draft="model", versions=publish.url, follow=True) as host:
        assert await drafted(host) == "0-0"
        proposed, stood = await generated(tiny, host)
        assert stood < proposed
        publish(1, of=tiny.model())
        await until(partial(drafts_with, host, "0-1"))
        proposed, stood = await generated(tiny, host)
        assert stood == proposed > 10


def test_what_an_engine_starts_with(tiny, publish, tmp_path):
    head = DraftHead(HeadConfig.of(tiny.model().config))
    save_head(head, tmp_path / "head")

    def start(**speculation):
        drafts = DraftVersions(SpeculationSettings(**speculation), {})
        try:
            with drafts.start() as found:
                return None if found is None else (sorted(p.name for p in found[0].iterdir()), found[1])
        finally:
            drafts.close()

    files = ["config.json", "model.safetensors"]
    assert start(draft="head", model=tmp_path / "head") == (files, "default")
    assert start(draft="head", model=f"file://{tmp_path}/head") == (files, "default")
    # Versions come before a folder, which is there for as long as there are none.
    assert start(draft="head", versions=publish.url, model=tmp_path / "head") == (files, "default")
    assert start(draft="head", versions=publish.url) is None
    with pytest.raises(EngineDied, match="holds no version yet; publish one"):
        start(draft="model", versions=publish.url)
    publish(4)
    assert start(draft="head", versions=publish.url, model=tmp_path / "head") == (files, "0-4")
    assert start(draft="head", model=f"{publish.url}@0-4") == (files, "default")
    with pytest.raises(StoreError):
        start(draft="head", model=tmp_path / "nowhere")


async def test_a_head_of_another_policy_ends_the_start_with_what_differs(tiny, hosted, publish):
    publish(0, config=HeadConfig.of(tiny.model("qwen3").config))
    with pytest.raises(EngineDied, match=r"--draft-model: the draft head is for another policy, of model_type qwen3"):
        async with hosted(draft="head", versions=publish.url):
            pass
