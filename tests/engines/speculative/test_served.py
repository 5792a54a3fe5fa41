"""Speculation over HTTP: switches, what replies and loads say, weights of the draft."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from rollart.engines.embedded.__main__ import main
from rollart.engines.speculative.draft import DraftError
from rollart.engines.speculative.making import make_speculator
from rollart.engines.speculative.settings import SpeculationSettings


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """The policy, and a draft that is another model."""
    found = []
    for seed in (0, 7):
        found.append(tmp_path_factory.mktemp("model"))
        tiny.model(seed=seed).save_pretrained(found[-1])
    return found


@pytest.fixture(scope="module")
def serve(folders, start_engine):
    def start(*arguments):
        return start_engine("--model", str(folders[0]), "--weight-version", "0-0", "--slots", "8", "--max-length", "128", *arguments)

    return start


async def test_an_ngram_draft_speeds_an_answer_up_that_it_has_heard_before(tiny, folders, serve, wire_to):
    async with wire_to(serve("--draft", "ngram", "--draft-length", "4", "--draft-fixed")) as wire:
        prompt = tiny.prompt(10)
        body = {"input_ids": prompt, "draft_key": "t", "sampling_params": {"max_new_tokens": 41, "temperature": 0, "ignore_eos": True}}
        first, again, without = [
            (await wire.post("/generate", {**body, **more}))[1] for more in ({}, {}, {"speculate": False})
        ]  # fmt: skip
        assert first["output_ids"] == again["output_ids"] == without["output_ids"] == tiny.greedy(tiny.model(), prompt, 41)
        meta = again["meta_info"]
        assert 9 <= meta["spec_verify_ct"] <= 12  # 41 tokens, five a pass at best
        # The prompt is cached, so its pass is one of them.
        assert meta["spec_num_correct_drafts"] == 41 - meta["spec_verify_ct"] <= meta["spec_num_proposed_drafts"]
        assert meta["spec_accept_length"] == 41 / meta["spec_verify_ct"]
        assert not [k for k in without["meta_info"] if k.startswith("spec_")]
        loads = (await wire.get("/v1/loads"))[1]
        both = [first["meta_info"], meta]
        for name in ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts"):
            assert loads[name] == sum(m[name] for m in both)
        assert loads["spec_accept_length"] == 1 + loads["spec_num_correct_drafts"] / loads["spec_verify_ct"]
        assert (loads["draft"], loads["draft_length"], loads["spec_alarm"]) == ("ngram", 4, None)
        assert (await wire.get("/server_info"))[1]["draft"] == "ngram"
        status, answer = await wire.post("/update_weights_from_disk", {"model_path": str(folders[0]), "selector": "draft"})
        assert (status, answer["message"]) == (400, "the ngram draft has no weights; leave selector out to load the policy's")


async def test_a_draft_models_weights_are_exchanged_without_the_policys(tiny, folders, serve, wire_to):
    async with wire_to(serve("--draft", "model", "--draft-model", str(folders[1]), "--draft-length", "3", "--draft-fixed")) as wire:
        prompt = tiny.prompt(10)
        refused = (await wire.generate(prompt, 21))["meta_info"]
        assert refused["spec_num_correct_drafts"] < refused["spec_num_proposed_drafts"]
        body = {"model_path": str(folders[0]), "selector": "draft", "weight_version": "0-1"}
        assert (await wire.post("/update_weights_from_disk", body))[0] == 200
        reply = await wire.generate(prompt, 21)
        assert reply["output_ids"] == tiny.greedy(tiny.model(), prompt, 21)
        assert reply["meta_info"]["spec_num_correct_drafts"] == reply["meta_info"]["spec_num_proposed_drafts"] == 15
        assert reply["meta_info"]["weight_version"] == "0-0"
        assert (await wire.get("/v1/loads"))[1]["draft_version"] == "0-1"


async def test_without_a_draft_nothing_is_told_of_one(wire, served):
    assert not [k for k in (await wire.get("/v1/loads"))[1] if k.startswith(("spec", "draft"))]
    assert not [k for k in (await wire.generate([5, 6], 4))["meta_info"] if k.startswith("spec")]
    status, answer = await wire.post("/update_weights_from_disk", {"model_path": str(served.folders[0]), "selector": "draft"})
    assert (status, "nothing drafts here" in answer["message"]) == (400, True)


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        (["--draft", "model"], "--draft model needs --draft-model"),
        (["--draft", "ngram", "--draft-model", "."], "--draft-model is of --draft model or head"),
        (["--draft", "ngram", "--deterministic"], "--deterministic allows no --draft"),
        (["--draft", "ngram", "--draft-length", "16"], "16 is not in the range 1<=x<=15"),
    ],
)
def test_switches_that_contradict_each_other_are_refused(switches, says):
    result = CliRunner().invoke(main, ["--model", ".", *switches])
    assert result.exit_code == 2
    assert says in result.output


def test_a_draft_that_does_not_fit_the_policy_is_refused(policy, small, tmp_path):
    served = policy(small(0, vocabulary=16))
    small(0).save_pretrained(tmp_path)
    with pytest.raises(DraftError, match="the draft's vocabulary has 12 tokens and the policy's 16"):
        make_speculator(SpeculationSettings("model", model=tmp_path), served, 4, 64, 64)
    small(0).config.save_pretrained(tmp_path / "bare")
    with pytest.raises(DraftError, match=r"bare holds no model.safetensors; a draft needs weights from the start"):
        make_speculator(SpeculationSettings("model", model=tmp_path / "bare"), served, 4, 64, 64)


def test_a_length_that_may_be_shortened_is_tried_from_none_on(policy, small, asking, finish, schedule):
    model = small(0)
    speculator = make_speculator(SpeculationSettings("ngram", 2), policy(model), 4, 64, 64)
    fixed = make_speculator(SpeculationSettings("ngram", 2, adaptive=False), policy(model), 4, 64, 64)
    assert make_speculator(SpeculationSettings(), policy(model), 4, 64, 64) is None
    asked = []
    for one in (speculator, fixed):
        scheduler = schedule(model, 4, speculator=one)
        scheduler.add(asking((5, 7, 3), 16))
        scheduler.step()
        for _ in range(12):
            scheduler.step()
            asked.append(one.asked)
    # Five steps of each length, as the one request decodes.
    assert asked == [0] * 5 + [1] * 5 + [2] * 2 + [2] * 12


def test_settings_say_on_the_command_line_what_they_are(tmp_path):
    assert SpeculationSettings().arguments() == []
    told = SpeculationSettings("model", 3, False, tmp_path, version="0-4").arguments()
    assert told == [
        "--draft", "model", "--draft-length", "3", "--draft-memory", "65536", "--draft-model", str(tmp_path), "--draft-version", "0-4",
        "--draft-fixed",
    ]  # fmt: skip
    assert SpeculationSettings("head", versions="s3://drafts", follow=True).arguments()[:2] == ["--draft", "head"]
    with pytest.raises(ValueError, match="a draft of kind model needs the folder of its model, or its versions"):
        SpeculationSettings("model")
    with pytest.raises(ValueError, match="a draft of kind ngram has no weights"):
        SpeculationSettings("ngram", model=tmp_path)
    with pytest.raises(ValueError, match="only a draft that has versions can follow them"):
        SpeculationSettings("head", model=tmp_path, follow=True)
