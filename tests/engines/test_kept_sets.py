"""What the embedded engine tells of its cuts: the kept set of every token, against brute force, in streams, after aborts and with drafts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.engines.client import EngineClient
from rollart.engines.errors import EngineRefused
from rollart.engines.response import Response
from rollart.engines.stream import StreamedReply
from rollart.training.batch import build_batch
from rollart.training.learner import Learner
from rollart.training.settings import LearnerSettings
from rollart.types import Attempt, Episode, GenerateRequest, GenerateResult, SamplingTransform, Segment, Trajectory

CUTS = {
    "top_k": SamplingTransform(0.8, top_k=5), "top_p": SamplingTransform(1.1, top_p=0.9), "both": SamplingTransform(1.0, top_p=0.8, top_k=9),
    "all": SamplingTransform(1.0, top_p=0.95, top_k=30, min_p=0.05),
}  # fmt: skip


def kept_by(logits: torch.Tensor, transform: SamplingTransform) -> list[int]:
    """By plain loops: temperature, the k likeliest, the fewest of these that come to top_p of them, then what isn't under min_p of the likeliest."""
    scaled = (logits.double() / transform.temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: transform.top_k if transform.top_k > 0 else None]
    total = sum(math.exp(scaled[i]) for i in order)
    kept, before = [], 0.0
    for i in order:
        if before >= transform.top_p:
            break
        kept.append(i)
        before += math.exp(scaled[i]) / total
    return sorted(i for i in kept if math.exp(scaled[i] - scaled[order[0]]) >= transform.min_p)


def moved(transform: SamplingTransform, by: float) -> SamplingTransform:
    return (
        dataclasses.replace(transform, top_p=min(transform.top_p + by, 1.0), min_p=transform.min_p * (1 - by)) if transform.top_p < 1 else transform
    )


@pytest.fixture(scope="module")
def model(tiny: Any) -> Any:
    return tiny.model()


@pytest.fixture(scope="module")
def policy(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["plain", "ngram", "model"])
def url(request: Any, tiny: Any, policy: Path, start_engine: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    other = tmp_path_factory.mktemp("draft")
    near = tiny.model()
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    near.save_pretrained(other)
    drafts = {"plain": (), "ngram": ("--draft", "ngram"), "model": ("--draft", "model", "--draft-model", str(other), "--draft-length", "3")}
    return start_engine("--model", str(policy), "--weight-version", "0-0", "--slots", "8", "--max-length", "128", *drafts[request.param])


def asked(tiny: Any, name: str, cut: SamplingTransform, tokens: int = 40, **more: Any) -> GenerateRequest:
    return GenerateRequest(name, tuple(tiny.prompt(12)), tokens, cut, seed=5, draft_key="t", return_kept=True, **more)


def checked(model: Any, request: GenerateRequest, result: GenerateResult) -> None:
    """The sets are those of brute force, and the log-probabilities are over them, to 1e-4 (the engine sums in another order)."""
    assert result.kept is not None and len(result.kept) == len(result.ids) > 0
    with torch.no_grad():
        logits = model(torch.tensor([[*request.input_ids, *result.ids]])).logits[0, len(request.input_ids) - 1 : -1]
    at = 0
    for row, token, logprob, count in zip(logits, result.ids, result.logprobs, result.kept.counts, strict=True):
        ids = result.kept.ids[at : at + count].tolist()
        at += count
        least, most = (set(kept_by(row, moved(request.transform, by))) for by in (-1e-4, 1e-4))  # the same but at the edge of a share
        assert ids == sorted(ids) and least <= set(ids) <= most and len(most) <= len(least) + 1
        assert torch.log_softmax(row[ids] / request.transform.temperature, -1)[ids.index(token)] == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
async def test_each_token_comes_with_what_the_cuts_kept_there(tiny: Any, model: Any, url: str, cut: SamplingTransform) -> None:
    async with EngineClient() as client:
        request = asked(tiny, "whole", cut)
        for _ in range(2):  # an n-gram draft knows the second by heart
            checked(model, request, await client.generate(url, request))
        beside = [dataclasses.replace(request, rid=f"{i}", input_ids=tuple(tiny.prompt(5 + i, seed=i)), seed=i) for i in range(4)]
        uncut = dataclasses.replace(request, rid="uncut", transform=SamplingTransform())
        *found, plain = await asyncio.gather(*(client.generate(url, one) for one in (*beside, uncut)))
        assert plain.kept is None
        for one, result in zip(beside, found, strict=True):
            checked(model, one, result)
        heard: list[GenerateResult] = []
        heard.append(await client.generate(url, asked(tiny, "streamed", cut), heard.append))
    assert len(heard) > 1
    for part in heard:
        checked(model, request, part)


@pytest.mark.parametrize("packing", [False, True])
async def test_a_trainer_says_of_each_token_what_the_engine_said(tiny: Any, policy: Path, url: str, packing: bool) -> None:
    trajectories = []
    async with EngineClient() as client:
        for member, cut in enumerate(2 * [CUTS["top_k"], CUTS["top_p"], CUTS["both"], SamplingTransform(0.9)]):
            segment = Segment(cut)
            for turn in range(2):
                segment.append_prompt(tiny.prompt(6, seed=10 * member + turn))
                request = GenerateRequest(f"{packing}/{member}/{turn}", tuple(segment.ids), 20, cut, seed=member, return_kept=cut.is_cut)
                result = await client.generate(url, request)
                steps = [v.step for v in result.versions]
                segment.append_response(result.ids, result.logprobs, steps, result.finish_reason, kept=result.kept)
            trajectories.append(Trajectory(Attempt(Episode("t", 0), member), f"n{member}", 0, 0, [segment], "terminated"))
    batch = build_batch(trajectories, {t.attempt: 1.0 for t in trajectories}, 0)
    settings = {"batch": {"packing": packing, "minibatches": 2}, "loss": {"kl": 0.1}, "model": {"head_rows": 64}, "optimiser": {"lr": 1e-3}}
    metrics = Learner(policy, LearnerSettings.model_validate(settings)).train_step(batch)
    assert metrics.drift_tokens == sum(t.sampled for t in trajectories) == metrics.tokens
    assert metrics.drift_max is not None and metrics.drift_max < 1e-4 and metrics.alarms == ()


async def test_an_aborted_response_brings_the_sets_of_what_it_has_and_goes_on_with_those_of_the_rest(tiny: Any, model: Any, url: str) -> None:
    cut = CUTS["both"]
    async with EngineClient() as client:
        begun = asyncio.Event()
        task = asyncio.create_task(client.generate(url, asked(tiny, "aborted", cut, 110), lambda _: begun.set()))
        await begun.wait()
        await client.abort(url, "aborted")
        part = await task
        checked(model, asked(tiny, "", cut), part)
        assert part.finish_reason == "abort" or len(part.ids) == 110
        response = Response(asked(tiny, "whole", cut, 20))
        assert response.lost(await client.generate(url, asked(tiny, "start", cut, 8)))
        whole = response.ended(await client.generate(url, response.left))
    assert (len(whole.ids), whole.rid) == (20, "whole")
    checked(model, asked(tiny, "", cut), whole)


async def test_an_event_of_a_stream_that_repeats_all_tokens_is_read_too(tiny: Any, model: Any, url: str, wire_to: Any) -> None:
    request = asked(tiny, "cumulative", CUTS["top_k"], 20)
    reply, result = StreamedReply(), None
    async with wire_to(url) as wire, wire.session.post(url + "/generate", json={**request.to_wire(stream=True), "incremental": False}) as response:
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                result = reply.take(json.loads(data))
    assert result is not None
    checked(model, request, result)


async def test_nothing_is_told_that_nobody_asked_for_or_where_nothing_is_cut_and_a_missing_set_is_an_error(
    tiny: Any, url: str, wire_to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wire_to(url) as wire, EngineClient() as client:
        assert "output_kept" not in (await wire.generate(tiny.prompt(12), 4, temperature=1.0, top_k=3))["meta_info"]
        assert (await client.generate(url, asked(tiny, "uncut", SamplingTransform()))).kept is None
        monkeypatch.setattr(GenerateRequest, "to_wire", lambda self, stream=False: wire_of(self, stream))
        with pytest.raises(EngineRefused, match="does not tell which ids top_k and top_p kept"):
            await client.generate(url, asked(tiny, "dropped", CUTS["top_k"]))


_TO_WIRE = GenerateRequest.to_wire


def wire_of(request: GenerateRequest, stream: bool) -> dict[str, Any]:
    """As an engine hears it that knows no `return_kept`."""
    return {name: value for name, value in _TO_WIRE(request, stream).items() if name != "return_kept"}
