"""The engine's benchmark: its workload, that every way generates just that, and the arithmetic of its figures."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.engine import BATCHES, draw, headline
from benchmarks.generating.passes import pass_rows
from benchmarks.generating.ways import CONTINUOUS, OURS, STATIC, ways
from benchmarks.generating.workload import Workload, workload
from benchmarks.outcome import Outcome


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tiny = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(tiny).save_pretrained(tmp_path)
    return tmp_path


def test_lengths_have_a_long_tail_and_belong_to_the_seed():
    work = workload(400, 100, 20, 200, seed=1)
    assert work == workload(400, 100, 20, 200, seed=1) != workload(400, 100, 20, 200, seed=2)
    assert np.median(work.lengths) == pytest.approx(20, abs=3)
    assert 100 < max(work.lengths) <= 200
    assert min(work.lengths) >= 4
    assert {16, 64} <= {len(p) for p in work.prompts}
    assert workload(1, 100, 20, 200, seed=1).lengths == (20,)


def test_every_way_generates_what_is_asked(folder: Path):
    arms = ways(folder, "float32")
    assert list(arms) == [OURS, STATIC, CONTINUOUS]
    # Each checks the lengths itself, and would say so.
    assert all(generate(Workload(((5, 6), (7, 8, 9)), (6, 3))) > 0.0 for generate in arms.values())


def test_passes_are_timed_by_batch_and_new_tokens(folder: Path):
    rows = pass_rows("tiny fp32", folder, "float32", (1, 2), (1, 3), 1)
    assert [(row["batch"], row["k"]) for row in rows] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(row["ours_ms"] > 0.0 and row["theirs_ms"] > 0.0 for row in rows)


def test_the_headline_takes_the_better_of_theirs_round_by_round_and_the_worst_policy(tmp_path: Path):
    rows: list[dict[str, Any]] = []
    for policy, rates in {"SmolLM2-135M bf16": ((60.0, 10.0, 20.0), (90.0, 30.0, 10.0)), "quick start fp32": ((80.0, 40.0, 10.0),)}.items():
        for batch in BATCHES:
            for number, round_ in enumerate(rates):
                rows += [
                    {"way": f"{policy} {arm}", "policy": policy, "arm": arm, "batch": batch, "round": number, "tokens_a_second": rate}
                    for arm, rate in zip((OURS, STATIC, CONTINUOUS), round_, strict=True)
                ]
    rows += [{"way": "pass", "policy": "SmolLM2-135M bf16", "batch": 8, "k": k, "ours_ms": 10.0 + k, "theirs_ms": 44.0} for k in (1, 4)]
    found = headline(rows)
    assert found["ratio_b8"] == found["ratio_b8_quick_start_fp32"] == 2.0
    assert found["ratio_b1_smollm2_bf16"] == 3.0
    assert found["pass_ratio_b8_k1_smollm2_bf16"] == 4.0
    assert found["pass_cost_b8_k4_smollm2_bf16"] == pytest.approx(14 / 11)
    draw(Outcome(rows, found)).savefig(tmp_path / "engine.png")
