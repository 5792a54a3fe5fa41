"""Continuous batching in one process, without HTTP: model families, determinism, KV that is kept, chunks, slots under pressure."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from safetensors.torch import save_file

from rollart.engines.embedded.model import PolicyModel, WeightsError
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.scheduler import Scheduler
from rollart.engines.embedded.wire import reply
from rollart.types import SamplingTransform, ServiceTime

_NUMBERS = count()


def request(prompt, tokens, temperature=0.0, seed=0, key=None):
    return Request(
        rid=str(next(_NUMBERS)), prompt=tuple(prompt), max_new_tokens=tokens, transform=SamplingTransform(temperature=temperature),
        seed=seed, stop_token_ids=frozenset(), extra_key=key,
    )  # fmt: skip


def finish(scheduler, *requests, add=True):
    """Steps until all have ended."""
    for one in requests if add else ():
        scheduler.add(one)
    while any(one.finish is None for one in requests):
        scheduler.step()
    return requests


@pytest.fixture
def schedule(tmp_path):
    """A scheduler over a model, of version 0-0."""

    def build(model, slots=4, max_length=128, chunk=16, **options):
        model.save_pretrained(tmp_path)
        policy = PolicyModel(tmp_path, torch.float32, torch.device("cpu"))
        return Scheduler(policy, slots, max_length, chunk, "0-0", lambda _: None, **options)

    return build


@pytest.mark.parametrize("kind", ["llama", "llama_untied", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_decodes_as_transformers_does(tiny, schedule, kind):
    model = tiny.model(kind)
    scheduler = schedule(model)
    # Chunked prefill, decode and a cached prefix all cross the sliding window of 12 that the Gemmas have.
    prompts = [tiny.prompt(n, seed=n) for n in (3, 20, 45)]
    done = finish(scheduler, *(request(p, 20) for p in prompts))
    for prompt, one in zip(prompts, done, strict=True):
        assert one.output_ids == tiny.greedy(model, prompt, 20)
        assert one.logprobs == pytest.approx(tiny.logprobs(model, prompt, one.output_ids), abs=1e-4)
    longer = [*prompts[2], *done[2].output_ids, 5, 6, 7]
    (again,) = finish(scheduler, request(longer, 5))
    assert again.cached_tokens == len(prompts[2]) + 19
    assert again.output_ids == tiny.greedy(model, longer, 5)


@pytest.mark.parametrize("mates", [1, 5, 20])
def test_deterministic_tokens_and_logprobs_do_not_depend_on_batch_mates(tiny, schedule, mates):
    scheduler = schedule(tiny.model(), slots=8, max_length=256, chunk=32, deterministic=True)
    (alone,) = finish(scheduler, request(tiny.prompt(70), 16, 1.0, seed=77))
    others = [request(tiny.prompt(10 + 5 * i, seed=i), 4 + i % 9, 1.0, seed=i) for i in range(mates)]
    for one in others:
        scheduler.add(one)
    for _ in range(7):
        scheduler.step()
    (again,) = finish(scheduler, request(tiny.prompt(70), 16, 1.0, seed=77))
    finish(scheduler, *others, add=False)
    assert again.output_ids == alone.output_ids
    assert again.logprobs == alone.logprobs
    assert again.cached_tokens == 0


def test_an_ordinary_engine_reuses_what_a_deterministic_one_may_not(tiny, schedule):
    scheduler = schedule(tiny.model(), slots=8, max_length=256, chunk=32)
    finish(scheduler, request(tiny.prompt(70), 16))
    (again,) = finish(scheduler, request(tiny.prompt(70), 16))
    assert again.cached_tokens == 69


def test_kept_kv_is_used_after_a_swap_but_never_by_another_request(tiny, schedule, tmp_path):
    models = [tiny.model(seed=s) for s in (0, 1)]
    scheduler = schedule(models[0], kv="kept")
    models[1].save_pretrained(tmp_path / "next")
    one = request(tiny.prompt(40), 30, 1.0, seed=3)
    scheduler.add(one)
    while len(one.output_ids) < 10:
        scheduler.step()
    scheduler.swap(scheduler._model.stage(tmp_path / "next"), "0-1")
    finish(scheduler, one, add=False)
    assert one.spans == [("0-0", 0, 10), ("0-1", 10, 30)]
    old, new = (tiny.logprobs(m, one.prompt, one.output_ids) for m in models)
    assert one.logprobs[:10] == pytest.approx(old[:10], abs=1e-4)
    # Neither a forward of the new weights over everything nor one of the old: new queries over old keys.
    assert one.logprobs[11] != pytest.approx(new[11], abs=1e-3)
    assert one.logprobs[11] != pytest.approx(old[11], abs=1e-3)
    (fresh,) = finish(scheduler, request(one.tokens, 4))
    assert fresh.cached_tokens == 0
    assert fresh.output_ids == tiny.greedy(models[1], one.tokens, 4)


def test_more_requests_than_slots_all_end_right(tiny, schedule):
    model = tiny.model()
    scheduler = schedule(model, slots=3, chunk=40)
    # Groups that share prompts, trajectories that continue, and keys that differ.
    firsts = [request(tiny.prompt(8 + 9 * (i // 3), seed=i // 3), 4 + i % 3, key=str(i % 2)) for i in range(24)]
    finish(scheduler, *firsts)
    seconds = finish(scheduler, *(request([*f.tokens, 9, 8], 4, key=f.extra_key) for f in reversed(firsts)))
    for one in (*firsts, *seconds):
        assert one.output_ids == tiny.greedy(model, one.prompt, one.max_new_tokens)
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_members_of_a_group_compute_their_prompt_once(tiny, schedule):
    model = tiny.model()
    scheduler = schedule(model, slots=16, chunk=256)
    prompt = tiny.prompt(100)
    members = finish(scheduler, *(request(prompt, 3, 1.0, seed=s) for s in range(8)))
    assert [m.cached_tokens for m in members] == [0] + [99] * 7
    assert scheduler.tally.prefilled == 100
    for member in members:
        assert member.logprobs == pytest.approx(tiny.logprobs(model, prompt, member.output_ids), abs=1e-4)


def test_members_of_a_group_whose_prompt_is_too_short_to_copy_enter_at_once(tiny, schedule):
    scheduler = schedule(tiny.model(), slots=16, chunk=256)
    members = [request(tiny.prompt(8), 3, 1.0, seed=s) for s in range(8)]
    for one in members:
        scheduler.add(one)
    scheduler.step()
    assert [len(m.output_ids) for m in members] == [1] * 8


def test_a_long_prompt_does_not_hold_up_running_responses(tiny, schedule):
    scheduler = schedule(tiny.model(), chunk=16)
    short = request(tiny.prompt(4), 8)
    scheduler.add(short)
    scheduler.step()
    long = request(tiny.prompt(100, seed=2), 2)
    scheduler.add(long)
    for _ in range(5):
        scheduler.step()
    assert len(short.output_ids) == 6
    assert not long.output_ids
    finish(scheduler, long, short, add=False)


def test_a_step_computes_no_more_prompt_tokens_than_the_chunk(tiny, schedule):
    scheduler = schedule(tiny.model(), chunk=16)
    for seed in range(3):
        scheduler.add(request(tiny.prompt(24, seed=seed), 1))
    totals = []
    while scheduler.has_work:
        scheduler.step()
        totals.append(scheduler.tally.prefilled)
    assert totals == [16, 32, 48, 64, 72]


def test_an_abort_ends_running_and_waiting_alike(tiny, schedule):
    scheduler = schedule(tiny.model(), slots=1)
    running, waiting, other = (request(tiny.prompt(5, seed=s), 50) for s in range(3))
    for one in (running, waiting, other):
        scheduler.add(one)
    scheduler.step()
    assert scheduler.abort(lambda r: r is not other) == 2
    assert [r.finish["type"] for r in (running, waiting)] == ["abort", "abort"]
    assert (len(running.output_ids), len(waiting.output_ids)) == (1, 0)
    finish(scheduler, other, add=False)
    assert len(other.output_ids) == 50


def _without(state, name):
    return {k: v for k, v in state.items() if k != name}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda s: _without(s, "model.norm.weight"), "lacks 1 weights, among them model.norm.weight"),
        (lambda s: {**s, "extra": torch.zeros(1)}, "holds extra"),
        (lambda s: {**s, "model.norm.weight": torch.zeros(3)}, r"has shape \(3,\), the model wants \(64,\)"),
        (lambda s: {**s, "model.norm.weight": torch.full((64,), torch.nan)}, "not finite"),
        (lambda s: {**s, "model.norm.weight": torch.full((64,), 1e300, dtype=torch.float64)}, "not finite in torch.float32"),
        (lambda s: {**s, "model.norm.weight": torch.ones(64, dtype=torch.int8)}, "of torch.int8, the model wants torch.float32"),
        (lambda s: {**s, "model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, "of torch.float8_e4m3fn, the model wants"),
        (lambda s: {**s, "model.norm.weight": torch.ones(64, dtype=torch.complex64)}, "of torch.complex64, the model wants"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tiny, schedule, tmp_path, spoil, says):
    model = tiny.model("llama_untied")
    scheduler = schedule(model)
    (tmp_path / "bad").mkdir()
    save_file(spoil({k: v.clone() for k, v in model.state_dict().items()}), tmp_path / "bad" / "model.safetensors")
    with pytest.raises(WeightsError, match=says):
        scheduler._model.stage(tmp_path / "bad")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_may_stand_under_either_name(tiny, schedule, tmp_path, name):
    scheduler, model = schedule(tiny.model(seed=0)), tiny.model(seed=1)
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    state[name] = state.pop("model.embed_tokens.weight")
    (tmp_path / "next").mkdir()
    save_file(state, tmp_path / "next" / "model.safetensors")
    scheduler.swap(scheduler._model.stage(tmp_path / "next"), "0-1")
    (one,) = finish(scheduler, request(tiny.prompt(10), 8))
    assert one.output_ids == tiny.greedy(model, one.prompt, 8)


def test_a_reply_says_how_long_its_request_waited_and_took_in_sglangs_words(tiny, schedule):
    scheduler = schedule(tiny.model(), slots=1)
    first, second = request(tiny.prompt(3, seed=1), 4), request(tiny.prompt(3, seed=2), 1)
    finish(scheduler, first, second)
    for one, tokens in ((first, 4), (second, 1)):
        meta = reply(one, "0-0", with_logprobs=False)["meta_info"]
        told = ServiceTime.from_meta(meta, tokens)
        waited, prefilled, decoded = one.entered - one.arrived, one.began - one.entered, one.ended - one.began
        assert told == ServiceTime(pytest.approx(waited), pytest.approx(prefilled), pytest.approx(decoded))
        assert one.arrived < one.entered < one.began
    assert second.entered > first.ended > first.began and second.ended == second.began


def test_an_aborted_reply_says_nothing_of_seconds(tiny, schedule):
    scheduler = schedule(tiny.model(), slots=1)
    one = request(tiny.prompt(3), 50)
    scheduler.add(one)
    scheduler.step()
    scheduler.abort(lambda _: True)
    assert ServiceTime.from_meta(reply(one, "0-0", with_logprobs=False)["meta_info"], 1) is None
