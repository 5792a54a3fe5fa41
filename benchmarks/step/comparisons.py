"""What is measured side by side: which models, batches and ways, as rows. Says nothing of what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.step.batches import Shape, draw_batch
from benchmarks.step.models import HEAD, SMOLLM2, TINY, make_model
from benchmarks.step.sides import LR, Case, Found, Side, in_turns

__all__ = ["Row", "agree", "lengths", "memory", "rank_rows", "smollm2"]

Row = dict[str, Any]
Way = tuple[Callable[[Case, Connection], None], dict[str, Any]]
"""What serves, and this project's settings for it."""

UNEVEN = Shape(32, 8, (8, 40), (1, 16))
"""Of the quick start's size: 256 sequences, and prompts and answers of many lengths."""

EVEN = Shape(32, 8, (24, 24), (8, 8))
AGREE = {"float32": 1e-3, "bfloat16": 5e-2}
"""How far the norms of the two sides' first gradients may differ, relative to them."""


def serve_trl(case: Case, pipe: Connection) -> None:
    """TRL's side; what serves is imported in its own process alone."""
    from benchmarks.step.trl_side import serve

    serve(case, pipe)


def serve_rollart(case: Case, pipe: Connection) -> None:
    """This project's side."""
    from benchmarks.step.rollart_side import serve_rollart

    serve_rollart(case, pipe)


def serve_rank(case: Case, pipe: Connection, port: int, rank: int, count: int) -> None:
    """One of this project's ranks."""
    from benchmarks.step.rollart_side import serve_rank

    serve_rank(case, pipe, port, rank, count)


PACKED: Way = (serve_rollart, {})
PADDED: Way = (serve_rollart, {"batch": {"packing": False}})
WHOLE: Way = (serve_rollart, {"model": {"head_rows": 10**9}})
TRL: Way = (serve_trl, {})


def settings_of(case: Case, changed: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """A learner's settings with TRL's optimiser; `changed` ones besides."""
    return {
        "model": {"dtype": case.dtype, "threads": case.threads} | changed.get("model", {}),
        "optimiser": {"lr": LR, "betas": [0.9, 0.999], "clip_norm": 1.0},
        "batch": {"token_budget": budget} | changed.get("batch", {}),
    }


def case_of(folder: Path, dtype: str, threads: int, shape: Shape, rounds: int) -> Case:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return Case(str(folder), dtype, threads, shape, vocabulary, rounds + 1, {})


def side_by_side(name: str, case: Case, ways: Mapping[str, Way], budget: int = 1024) -> list[Row]:
    """One row a way and round. ValueError if the first gradients of the ways differ: they would not have done the same."""
    with ExitStack() as open_sides:
        sides = {}
        for way, (serve, changed) in ways.items():
            given = replace(case, settings=settings_of(case, changed, budget))
            sides[way] = open_sides.enter_context(Side(serve, given))
        first, found = in_turns(sides, case.steps - 1)
    agree(name, {way: cost["grad_norm"] for way, cost in first.items()}, AGREE[case.dtype])
    return [row_of(f"{name}: {way}", case, number, cost) for way, costs in found.items() for number, cost in enumerate(costs)]


def agree(name: str, norms: Mapping[str, float], apart: float) -> None:
    """ValueError if norms of gradients differ by more than `apart`, relative to the smallest."""
    if max(norms.values()) - min(norms.values()) > apart * min(norms.values()):
        raise ValueError(f"{name}: the norms of the first gradients differ, so the sides have not taken the same step: {dict(norms)}")


def row_of(way: str, case: Case, number: int, cost: Found) -> Row:
    trained = draw_batch(case.shape, case.vocabulary).trained
    return {
        "way": way, "round": number, "dtype": case.dtype, "threads": case.threads, "trained_tokens": trained, "seconds": cost["seconds"],
        "cpu_seconds": cost["cpu_seconds"], "tokens_a_second": trained / cost["seconds"], "padding_share": cost["padding_share"],
        "peak_mb": cost["extra_bytes"] / 1e6, "grad_norm": cost["grad_norm"],
    }  # fmt: skip


def lengths(root: Path, quick: bool) -> list[Row]:
    """The quick start's policy on sequences of many lengths, packed, padded and by TRL, and on sequences of one length."""
    folder = make_model(TINY, root)
    rows = side_by_side(TINY, case_of(folder, "float32", 1, UNEVEN, 4 if quick else 12), {"rollart": PACKED, "rollart, padded": PADDED, "TRL": TRL})
    if not quick:
        rows += side_by_side(f"{TINY}, one length", case_of(folder, "float32", 1, EVEN, 6), {"rollart": PACKED, "TRL": TRL})
    return rows


def smollm2(root: Path) -> list[Row]:
    """SmolLM2-135M in fp32 and bf16, a thread each."""
    folder = make_model(SMOLLM2, root)
    rows: list[Row] = []
    for dtype, ways in (
        ("float32", {"rollart": PACKED, "rollart, padded": PADDED, "TRL": TRL}),
        ("bfloat16", {"rollart": PACKED, "TRL": TRL}),
    ):
        case = case_of(folder, dtype, 1, Shape(2, 4, (24, 64), (8, 96)), 2)
        rows += side_by_side(f"{SMOLLM2}, {dtype}", case, ways)
    return rows


def memory(root: Path, quick: bool) -> list[Row]:
    """The output layer of SmolLM2-135M over two of its layers: logits in chunks, all at once, and TRL's way, in one pass each."""
    case = case_of(make_model(HEAD, root), "float32", 1, Shape(4 if quick else 8, 8, (16, 16), (64, 64)), 1 if quick else 2)
    ways = {"chunked": PACKED, "whole": WHOLE} | ({} if quick else {"TRL": TRL})
    return side_by_side("49,152 words", replace(case, trim=True), ways, budget=10**6)


def rank_rows(root: Path, quick: bool) -> list[Row]:
    """One rank, and two that share its batch, a thread each: the seconds of two are those of the slower one."""
    rows = ranks_of(TINY, case_of(make_model(TINY, root), "float32", 1, UNEVEN, 4 if quick else 8))
    if not quick:
        rows += ranks_of(HEAD, case_of(make_model(HEAD, root), "float32", 1, Shape(4, 4, (24, 64), (8, 96)), 3))
    return rows


def ranks_of(name: str, case: Case) -> list[Row]:
    from rollart.training.process_group import open_store

    case = replace(case, settings=settings_of(case, {}, 1024))
    store = open_store("127.0.0.1")
    with ExitStack() as open_sides:
        alone = open_sides.enter_context(Side(serve_rollart, case))
        pair = [open_sides.enter_context(Side(serve_rank, case, store.port, rank, 2)) for rank in range(2)]
        for side in (alone, *pair):
            side.answer()
        rows = []
        for number in range(-1, case.steps - 1):
            one = alone.step()
            for side in pair:
                side.ask()
            two = [side.answer() for side in pair]
            slower = max(two, key=lambda cost: cost["seconds"])
            if number < 0:
                agree(name, {"one": one["grad_norm"], "two": slower["grad_norm"]}, AGREE[case.dtype])
                continue
            rows += [row_of(f"{name}: {way}", case, number, cost) for way, cost in (("1 rank", one), ("2 ranks", slower))]
    return rows
