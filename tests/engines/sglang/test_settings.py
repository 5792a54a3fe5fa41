"""The command that starts a server, and the flags that a configuration may add to it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rollart.engines.sglang.drafts import adaptive_steps, lossy_drafts
from rollart.engines.sglang.flags import LOSSY, OWN, flag_arguments, wrong_flags
from rollart.engines.sglang.settings import SglangSettings
from rollart.engines.speculative.settings import DraftKind, SpeculationSettings
from rollart.types import SamplingTransform


def arguments(settings: SglangSettings) -> dict[str, str | bool]:
    """What SGLang is given, by name."""
    command = settings.command(Path("/model"), "10.0.0.1")
    given = command[command.index("--") + 1 :]
    return {
        word[2:]: given[i + 1] if i + 1 < len(given) and not given[i + 1].startswith("--") else True
        for i, word in enumerate(given)
        if word.startswith("--")
    }


def test_a_server_on_a_cpu_has_room_for_its_slots_and_one_thread() -> None:
    settings = SglangSettings("x", python="/venv/bin/python", slots=4, max_length=100, chunk=64)
    command = settings.command(Path("/model"), "10.0.0.1")
    assert command[:7] == ["-m", "rollart.engines.sglang", "--host", "10.0.0.1", "--python", "/venv/bin/python", "--"]
    given = arguments(settings)
    assert given["model-path"] == "/model" and given["load-format"] == "dummy" and given["device"] == "cpu"
    assert given["context-length"] == "108" and given["max-total-tokens"] == "432" and given["max-running-requests"] == "4"
    assert given["attention-backend"] == "torch_native" and given["disable-overlap-schedule"] is True
    assert given["enable-metrics"] is True and given["stream-interval"] == "32" and given["incremental-streaming-output"] is True
    assert settings.environment["OMP_NUM_THREADS"] == "1" and settings.environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_server_on_gpus_has_their_memory() -> None:
    settings = SglangSettings("x", device="cuda:2", tensor_parallel=2, memory_fraction=0.8, dtype="bfloat16", flags={"page-size": 16})
    given = arguments(settings)
    assert (given["device"], given["base-gpu-id"], given["tp-size"], given["mem-fraction-static"]) == ("cuda", "2", "2", "0.8")
    assert given["page-size"] == "16" and "attention-backend" not in given and "max-total-tokens" not in given
    assert "SGLANG_USE_CPU_ENGINE" not in settings.environment


@pytest.mark.parametrize(("kv", "swap"), [("recomputed", "retracting"), ("kept", "in_place")])
def test_what_becomes_of_the_kv_says_how_weights_are_swapped(kv: str, swap: str) -> None:
    assert SglangSettings("x", kv=kv).swap == swap  # type: ignore[arg-type]


def test_flags_with_and_without_a_value() -> None:
    flags = {"disable-radix-cache": True, "enable-mixed-chunk": False, "page-size": 16, "schedule-policy": "fcfs"}
    assert flag_arguments(flags) == ["--disable-radix-cache", "--page-size", "16", "--schedule-policy", "fcfs"]


@pytest.mark.parametrize("name", ["disable-radix-cache", "page-size", "enable-deterministic-inference", "cuda-graph-max-bs-decode"])
def test_what_changes_no_distribution_may_be_added(name: str) -> None:
    assert list(wrong_flags({name: True})) == []


@pytest.mark.parametrize("name", [*OWN, *LOSSY, "--page-size", "page_size", "page-size=3", "quant", "tok"])
def test_what_the_system_sets_or_is_not_lossless_is_refused(name: str) -> None:
    ((refused, why),) = wrong_flags({name: True})
    assert refused == name and len(why) > 20


SPECULATION = {
    "ngram": (
        SpeculationSettings("ngram", 5, memory=1000),
        {"algorithm": "NGRAM", "num-draft-tokens": "6", "ngram-max-bfs-breadth": "1", "ngram-capacity": "18000"},
    ),
    "model": (
        SpeculationSettings("model", 3, model="/draft"),
        {
            "algorithm": "STANDALONE", "num-draft-tokens": "4", "num-steps": "3", "eagle-topk": "1", "draft-model-path": "/draft",
            "draft-load-format": "auto",
        },
    ),
    "head": (
        SpeculationSettings("head", 4, model="/head"),
        {
            "algorithm": "EAGLE3", "num-draft-tokens": "5", "num-steps": "4", "eagle-topk": "1", "draft-model-path": "/head",
            "draft-load-format": "auto", "use-rejection-sampling": True,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("draft", list(SPECULATION))
def test_drafts_are_chains_that_sglang_verifies_and_the_policys_own_slots_stay(draft: str) -> None:
    speculation, expected = SPECULATION[draft]
    given = arguments(SglangSettings("x", device="cuda", slots=40, speculation=speculation))
    assert {name.removeprefix("speculative-"): value for name, value in given.items() if name.startswith("speculative-")} == expected
    assert given["max-running-requests"] == "40" and given["load-format"] == "dummy"
    assert SglangSettings("x", speculation=speculation, tensor_parallel=2).by_tensors == (0 if draft == "ngram" else 2)


def test_an_older_heads_algorithm_is_eagle_and_without_drafts_there_is_no_flag() -> None:
    assert arguments(SglangSettings("x", speculation=SPECULATION["head"][0], head="eagle"))["speculative-algorithm"] == "EAGLE"
    assert not [name for name in arguments(SglangSettings("x")) if name.startswith("speculative")]


@pytest.mark.parametrize(("length", "alone"), [(2, [1, 2]), (4, [1, 3, 4]), (15, [1, 3, 5, 7, 15])])
def test_a_heads_drafts_get_shorter_where_that_is_faster_and_never_longer_than_they_may(length: int, alone: list[int]) -> None:
    speculation = SpeculationSettings("head", length, model="/head")
    steps = adaptive_steps(speculation)
    assert steps is not None and steps["1"] == {"candidate_steps": alone}
    assert [steps[batch]["candidate_steps"] for batch in ("8", "32", "64")] == [sorted({0, 1, min(3, length)}), [0, 1], [0]]
    command = SglangSettings("x", speculation=speculation).command(Path("/model"), "10.0.0.1")
    assert json.loads(command[command.index("--adaptive") + 1]) == steps and command.index("--adaptive") < command.index("--")
    assert adaptive_steps(dataclasses.replace(speculation, adaptive=False)) is None
    assert adaptive_steps(SPECULATION["ngram"][0]) is None and adaptive_steps(SPECULATION["model"][0]) is None


@pytest.mark.parametrize("draft", list(SPECULATION))
def test_drafts_that_would_change_what_is_sampled_are_told_with_the_reason(draft: DraftKind) -> None:
    plain = SamplingTransform(temperature=0.7)
    assert list(lossy_drafts(draft, "cuda:1", plain)) == []
    assert list(lossy_drafts(draft, "cuda", SamplingTransform(top_k=5))) == list(lossy_drafts(draft, "cuda", SamplingTransform(top_p=0.9))) == []
    for device, transform, said in (
        ("cpu", plain, "greedily whatever the temperature"), ("cuda", SamplingTransform(min_p=0.1), "without min_p"),
        ("cuda", SamplingTransform(top_k=5, top_p=0.9), "top_k and top_p cut one after the other"),
    ):  # fmt: skip
        (why,) = lossy_drafts(draft, device, transform)
        assert said in why
        assert list(lossy_drafts("none", device, transform)) == []
