"""The command that starts a server, and the flags that a configuration may add to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.engines.sglang.flags import LOSSY, OWN, flag_arguments, wrong_flags
from rollart.engines.sglang.settings import SglangSettings


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
    assert list(wrong_flags({name: True}, "cuda")) == []


@pytest.mark.parametrize("name", [*OWN, *LOSSY, "--page-size", "page_size", "page-size=3", "quant", "tok"])
def test_what_the_system_sets_or_is_not_lossless_is_refused(name: str) -> None:
    ((refused, why),) = wrong_flags({name: True}, "cuda")
    assert refused == name and len(why) > 20


def test_speculation_is_refused_on_a_cpu_alone_where_it_is_not_lossless() -> None:
    flags = {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 4}
    assert list(wrong_flags(flags, "cuda")) == []
    assert [why.partition(",")[0] for _, why in wrong_flags(flags, "cpu")] == ["on a CPU SGLang accepts drafts greedily whatever the temperature"] * 2
