"""Two and three ranks in a process group over gloo come to what one rank comes to, with whole models and with spread ones."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollart.engines.weight_cache import WeightCache
from rollart.training.metrics import StepMetrics
from rollart.training.process_group import open_store
from rollart.training.ranks import ALONE
from rollart.training.settings import LearnerSettings
from rollart.types import Batch, Group, Member, Receipt, Score, Trajectory
from storage.arrays.writing import new_attempt
from storage.version import Version
from storage.weights import WeightStore
from tests.training.conftest import make_trajectories_of
from tests.training.rank_process import Case, Found, Numbers, ask_again, carry_out, go_on, main

PASSES = {"passes_1": (10_000, None), "passes_2": (133, 1), "passes_7": (36, 2)}
"""The token budget, and what the order of the batch is drawn with, None for its own."""

CUT = [f"{name}_{dtype}" for name in PASSES for dtype in ("float64", "float32")]

NAMES = ["plain", "rich", "valued", "narrow", "drafting", "sharded", "sharded_rich", "sharded_valued", "sharded_narrow", "sharded_bfloat16"]
EXACT = [n for n in NAMES if not n.endswith(("narrow", "bfloat16"))]


def settings(name: str) -> LearnerSettings:
    """Float64 and one minibatch, or two with a loss of several parts, a value head, or float32 and bfloat16."""
    model: dict[str, Any] = {"dtype": "float64", "shard": name.startswith("sharded")}
    batch: dict[str, Any] = {"token_budget": 24}
    made: dict[str, Any] = {"optimiser": {"lr": 1e-3, "weight_decay": 0.1}, "model": model, "batch": batch}
    made |= {"agreement": {"sample": 100, "every": 1}}
    kind = name.removeprefix("sharded_")
    if kind == "rich":
        batch |= {"minibatches": 2, "denominator": "trajectory", "packing": False}
        model |= {"recompute": True, "head_rows": 4}
        made |= {"loss": {"entropy": 0.01, "kl": 0.1}, "advantage": {"name": "reinforce", "baseline": "running", "normalise": "task"}}
    elif kind == "valued":
        made |= {"advantage": {"name": "gae", "normalise": "task"}}
    elif kind == "drafting":
        made |= {"draft": {"online": True, "steps": 2}}
    elif kind == "narrow":
        model |= {"dtype": "float32"}
    elif kind == "bfloat16":
        model |= {"dtype": "bfloat16"}
    return LearnerSettings.model_validate(made)


def receipt_of(trajectory: Trajectory, row: int) -> Receipt:
    tokens = sum(len(s) for s in trajectory.segments)
    return Receipt(trajectory.attempt, trajectory.nonce, 0, "file", row, trajectory.outcome, 0, 0, tokens, trajectory.sampled, 1)


def batch_of(trajectories: list[Trajectory], step: int, rows: Sequence[int]) -> Batch:
    members: dict[Any, list[Member]] = {}
    for row, t in ((row, trajectories[row]) for row in rows):
        members.setdefault(t.attempt.episode, []).append(Member(receipt_of(t, row), Score(t.attempt, t.nonce, float((row * 7 + step) % 3))))
    return Batch(0, step, tuple(Group(e, tuple(m)) for e, m in members.items()))


@pytest.fixture(scope="module")
def cases(gpt2: Path) -> dict[str, Case]:
    trajectories = make_trajectories_of((4, 3, 1))
    empty = replace(trajectories[-1], segments=[])  # nothing was sampled
    trajectories = [*trajectories[:-1], empty]
    every, few = range(len(trajectories)), (0, 7)  # of the few, two of three ranks have nothing to train on
    found = {}
    for name in NAMES:
        batches = [batch_of(trajectories, 0, every), batch_of(trajectories, 1, few if name.endswith("rich") else every)]
        found[name] = Case(str(gpt2), settings(name), trajectories, batches, [receipt_of(t, i) for i, t in enumerate(trajectories)])
    for name in CUT:
        kind, _, dtype = name.rpartition("_")
        budget, order = PASSES[kind]
        rows = every if order is None else random.Random(order).sample(every, len(every))
        made = LearnerSettings.model_validate(
            {"model": {"dtype": dtype}, "batch": {"token_budget": budget, "packing": False}, "loss": {"entropy": 0.01}}
        )
        found[name] = Case(str(gpt2), made, trajectories, [batch_of(trajectories, 0, rows)], [])
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the ranks save their parts."""
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def sent(cases: dict[str, Case], url: str) -> Iterator[list[Any]]:
    """What each of three processes found, by case and number of ranks, and the weights that they came to from two ranks' checkpoint."""
    store = open_store("127.0.0.1")
    attempt = new_attempt()
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(3)]
    processes = [spawn.Process(target=main, args=(rank, store.port, cases, url, attempt, sender)) for rank, (_, sender) in enumerate(pipes)]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that the end of a process ends its pipe
        yield [receiver.recv() for receiver, _ in pipes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def together(sent: list[Any]) -> list[dict[tuple[str, int], Found]]:
    return [found for found, *_ in sent]


@pytest.fixture(scope="module")
def expected(cases: dict[str, Case]) -> dict[str, Found]:
    return {name: carry_out(case, ALONE) for name, case in cases.items()}


def apart(found: dict[str, Numbers], wanted: dict[str, Numbers]) -> float:
    """Largest difference of any number, relative to the largest of its tensor."""
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[n] - wanted[n]).max() / max(np.abs(wanted[n]).max(), 1e-30)) for n in wanted)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_weights_are_those_of_one_rank(together: Any, expected: dict[str, Found], name: str, count: int) -> None:
    close = 1e-10 if name in EXACT else 1e-5 if name.endswith("narrow") else 5e-2
    found, wanted = together[0][name, count], expected[name]
    assert len(found.gradients) == len(wanted.gradients) >= 2
    assert max(apart(mine, theirs) for mine, theirs in zip(found.gradients[:1], wanted.gradients[:1], strict=True)) <= close
    if name in EXACT:  # Adam divides by the gradient's size, which makes much of what rounding leaves in float32
        assert max(apart(mine, theirs) for mine, theirs in zip(found.gradients, wanted.gradients, strict=True)) <= 10 * close
        assert apart(found.weights, wanted.weights) <= 10 * close


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-10), ("float32", 1e-5)])
def test_gradients_agree_across_1_2_and_7_passes_1_2_and_3_ranks_and_orders(
    together: Any, expected: dict[str, Found], dtype: str, close: float
) -> None:
    wanted = expected[f"passes_1_{dtype}"]
    assert [expected[f"{name}_{dtype}"].steps[0].micro_batches for name in PASSES] == [1, 2, 7]
    for found in (*(expected[f"{n}_{dtype}"] for n in PASSES), *(together[0][f"{n}_{dtype}", count] for n in PASSES for count in (2, 3))):
        assert apart(found.gradients[0], wanted.gradients[0]) <= close


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_same_weights_and_say_the_same(together: Any, name: str, count: int) -> None:
    first = together[0][name, count]
    for rank in range(1, count):
        other = together[rank][name, count]
        assert all(np.array_equal(first.weights[n], other.weights[n]) for n in first.weights)
        assert [timeless(s) for s in other.steps] == [timeless(s) for s in first.steps]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_a_step_says_of_the_whole_batch_what_one_rank_says(together: Any, expected: dict[str, Found], name: str, count: int) -> None:
    assert together[0][name, count].losses == pytest.approx(expected[name].losses, rel=1e-12)
    for mine, theirs in zip(together[0][name, count].steps, expected[name].steps, strict=True):
        assert plain(mine) == pytest.approx(plain(theirs), rel=1e-9, abs=1e-12)
        assert (mine.skipped, mine.by_staleness.keys()) == (theirs.skipped, theirs.by_staleness.keys())


def timeless(metrics: StepMetrics) -> StepMetrics:
    return replace(metrics, seconds=0, draft=None if metrics.draft is None else replace(metrics.draft, seconds=0))


@pytest.mark.parametrize("count", [2, 3])
def test_a_draft_head_learns_over_ranks_what_it_learns_on_one(together: Any, expected: dict[str, Found], count: int) -> None:
    for mine, theirs in zip(together[0]["drafting", count].steps, expected["drafting"].steps, strict=True):
        assert mine.draft is not None and theirs.draft is not None
        assert mine.draft.acceptance == pytest.approx(theirs.draft.acceptance, rel=1e-4)
        assert mine.draft.loss == pytest.approx(theirs.draft.loss, rel=1e-4)
        assert mine.draft.grad_norm == pytest.approx(theirs.draft.grad_norm, rel=1e-3)
    first, second = (s.draft for s in expected["drafting"].steps)
    assert first is not None and second is not None and second.loss != first.loss


def plain(metrics: StepMetrics) -> dict[str, float]:
    """The numbers that don't depend on how the batch was cut up."""
    cut = {"seconds", "micro_batches", "padding_share"}
    return {n: v for n in metrics.__slots__ if n not in cut and isinstance(v := getattr(metrics, n), int | float)}


@pytest.mark.parametrize("count", [2, 3])
def test_each_trajectory_is_read_by_one_rank(together: Any, cases: dict[str, Case], count: int) -> None:
    read = [row for rank in range(count) for row in together[rank]["plain", count].read]
    assert sorted(read) == sorted(2 * list(range(len(cases["plain"].trajectories))))
    assert all(together[rank]["plain", count].read for rank in range(count))


def test_what_two_ranks_save_three_ranks_and_one_go_on_from(sent: Any, cases: dict[str, Case], url: str) -> None:
    alone = go_on(cases["sharded"], ALONE, url)
    for _, resumed, *_ in sent:
        assert apart(resumed, alone) <= 1e-9
    assert apart(alone, carry_out(replace(cases["sharded"], supervised=[]), ALONE).weights) <= 1e-9


def test_ranks_ask_a_stored_version_again_together_whether_their_model_is_spread_or_not(sent: Any, cases: dict[str, Case], url: str) -> None:
    alone = ask_again(cases["plain"], ALONE, url)
    assert alone is not None and alone.tokens > 50 and alone.highest > alone.mean > 0.1  # the tokens' own numbers are made up
    for *_, again in sent:
        for found in again:
            assert (found.version, found.tokens) == (Version(0, 1), alone.tokens)
            assert (found.mean, found.highest) == pytest.approx((alone.mean, alone.highest), rel=1e-9)


def test_two_ranks_publish_a_version_that_is_pulled_like_any_other(sent: Any, cases: dict[str, Case], url: str, tmp_path: Path) -> None:
    store = WeightStore(f"{url}/weights")
    case = replace(cases["sharded"], supervised=[], batches=cases["sharded"].batches[:1])
    wanted = carry_out(case, ALONE).weights
    found = store.pull(Version(0, 1))
    assert apart({name: value.double().numpy() for name, value in found.items()}, wanted) <= 1e-9
    name = max(wanted, key=lambda n: wanted[n].size)
    rows = store.pull(Version(0, 1), names=[name], slices={name: slice(1, 4)})[name]
    assert np.array_equal(rows.double().numpy(), found[name][1:4].double().numpy())
    assert any(tensor.shards for tensor in store.commit(Version(0, 1)).tensors.values())
    for _, _, taken, _ in sent:  # by each of three ranks, which hold a third of it
        assert all(np.array_equal(taken[n], value.double().numpy()) for n, value in found.items())
    cache = WeightCache(store, tmp_path)  # where a host's engines load from
    loaded = load_file(cache.fetch(Version(0, 1)) / "model.safetensors")
    cache.close()
    assert loaded.keys() == found.keys()
    assert all(torch.equal(loaded[n], value) for n, value in found.items())
