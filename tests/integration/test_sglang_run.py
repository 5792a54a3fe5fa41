"""A run whose engines are real SGLang servers in place of the embedded ones: it trains, through swaps in the middle of responses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.sglang import PYTHON, needs_sglang

STEPS = 5
ENGINE = ("engine.kind=sglang", f"engine.sglang.python={PYTHON}", "engine.slots=16")
# An untrained policy seldom ends a response by itself, so that some are under way whenever weights change; REINFORCE learns from any scores.
LONG = (
    "warm_up.steps=0", "tasks.chain_sum.max_new_tokens=64", "tasks.chain_sum.max_tokens=96", "tasks.guess_number.max_new_tokens=8",
    "training.advantage.name=reinforce", "training.agreement.every=1", "evaluate.episodes=4", "evaluate.every=0", f"train.steps={STEPS}",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]


@pytest.fixture(scope="module")
def ended(place: Any) -> SimpleNamespace:
    """The run, finished, with what of its processes and folders was left when it ended."""
    running = place.start("sglang", *ENGINE, *LONG)
    running.says("training step 1/")
    servers = [p for p in running.alive() if "sglang" in " ".join(p.cmdline())]
    code = running.wait()
    return SimpleNamespace(running=running, code=code, servers=servers, left=running.left(), place=place, table=place.trajectories("sglang"))


def test_it_ends_well_and_leaves_no_process_and_no_folder(ended: SimpleNamespace) -> None:
    assert ended.code == 0, ended.running.heard
    assert len(ended.servers) >= 4  # the launcher and the server's three
    assert ended.left == []
    assert not ended.running.shared_memory.exists()
    assert [p.name for p in ended.running.temporary.iterdir() if p.name.startswith(("rollart", "sglang"))] == []


def test_it_trains_on_what_the_servers_sampled_with_every_version(ended: SimpleNamespace) -> None:
    store = ended.place.weights("sglang")
    assert [str(v) for v in store.versions()] == [f"0-{n}" for n in range(STEPS + 1)]
    steps = [line["train"] for line in ended.place.metrics("sglang", "step")]
    assert len(steps) == STEPS and all(s["optimiser_steps"] for s in steps)
    first, last = (store.pull(v) for v in (store.versions()[0], store.versions()[-1]))
    assert any(not bool((first[name] == value).all()) for name, value in last.items())
    trained = ended.table[ended.table["fate"] == "trained"]
    sampled = {v for row in trained.itertuples() for s in row.segments for v in s["versions"] if v >= 0}
    assert sampled >= set(range(STEPS - 1))


def test_swaps_met_responses_which_went_on(ended: SimpleNamespace) -> None:
    met = 0
    for row in ended.table.itertuples():
        for segment in row.segments:
            for turn in segment["turns"]:
                versions = list(segment["versions"][turn["start"] : turn["end"]])
                assert versions == sorted(versions) and turn["finish_reason"] in ("stop", "length")
                met += len(set(versions)) > 1
    assert met


def test_what_the_servers_say_of_their_tokens_the_trainer_says_too(ended: SimpleNamespace) -> None:
    steps = [line["train"] for line in ended.place.metrics("sglang", "step")]
    seen = [s for s in steps if s["drift"] is not None]
    assert len(seen) >= 3 and sum(s["drift_tokens"] for s in seen) > 100
    assert max(s["drift"] for s in seen) < 1e-4 and max(s["drift_max"] for s in seen) < 1e-3
    assert sum(s["drift_alarm"] for s in steps) == 0
