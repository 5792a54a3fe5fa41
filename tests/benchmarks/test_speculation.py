"""The arithmetic of speculation's figures on rows that are known, what a play counts, and what the runs end to end are told."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import speculation
from benchmarks.outcome import Outcome
from benchmarks.speculating.end_to_end import bound, config
from benchmarks.speculating.play import Played, play
from benchmarks.speculating.questions import Question
from benchmarks.speculation import AGAIN, BATCHES, FP32, PLAIN, draw, headline, row_of, scheduler
from rollart.config import Config
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.speculative.ngram_draft import NgramDraft
from rollart.engines.speculative.speculator import Speculator
from rollart.types import SamplingTransform


def played(tokens: int, passes: int, verified: int, correct: int) -> Played:
    return Played(tokens, seconds=10.0, passes=passes, verified=verified, drafted=2 * verified, correct=correct, texts=[])


def test_the_headline_takes_the_best_draft_over_the_faster_plain_engine(tmp_path: Path):
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        for number in range(2):
            rows.append(row_of(PLAIN, batch, number, played(100, 100, 0, 0)))
            rows.append(row_of(FP32, batch, number, played(200, 200, 0, 0)))
            rows.append(row_of("ngram 2", batch, number, played(300, 150, 150, 150)))
            rows.append(row_of("ngram, adaptive", batch, number, played(250, 200, 200, 50)))
            rows.append(row_of(AGAIN, batch, number, played(800, 200, 200, 600)))
    found = headline(rows)
    assert found["generation_speedup_b8"] == 1.5  # over fp32, which was the faster one of those that draft nothing
    assert found["acceptance_length_b8"] == 2.0
    assert found["cycle_cost_b8"] == pytest.approx(200 / 150)
    assert (found["adaptive_speedup_b8"], found["asked_again_speedup_b8"]) == (1.25, 4.0)
    draw(Outcome(rows, found)).savefig(tmp_path / "speedups.png")


@pytest.fixture
def policy(tmp_path: Path) -> PolicyModel:
    torch.manual_seed(0)
    tiny = LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(tiny).save_pretrained(tmp_path / "policy")
    return PolicyModel(tmp_path / "policy", torch.float32, torch.device("cpu"))


def test_a_play_counts_the_passes_of_full_batches_that_read_no_prompt(policy: PolicyModel):
    asked = [Question("sums", (3, 4, 5)), Question("sums", (6, 7))]
    found = play(scheduler(policy, 2, None), asked, 3, 2, 6, SamplingTransform(1.0), frozenset(), seed=0)
    # Six responses of six tokens, two at a time: the first token of each comes with its prompt.
    assert (found.passes, found.tokens, found.acceptance_length) == (15, 30, 1.0)
    assert [len(response) for _, _, response in found.texts] == [6] * 6


def test_a_plays_drafts_are_counted_and_change_no_token(policy: PolicyModel):
    asked = [Question("sums", (3, 4, 5))]
    plain = play(scheduler(policy, 1, None), asked, 2, 1, 20, SamplingTransform(0.05), frozenset(), seed=0)
    drafted = play(scheduler(policy, 1, Speculator(NgramDraft(), 2)), asked, 2, 1, 20, SamplingTransform(0.05), frozenset(), seed=0)
    assert drafted.texts == plain.texts
    assert drafted.verified > 0
    assert drafted.acceptance_length == 1 + drafted.correct / drafted.verified > 1


def test_amdahls_bound():
    assert bound(0.5, 2.0) == pytest.approx(4 / 3)
    assert bound(0.0, 9.0) == 1.0


def test_the_runs_end_to_end_differ_by_the_draft_alone():
    plain, drafted = (config(draft, alpha=0, steps=4, groups=3) for draft in ({}, {"draft": "ngram", "length": 2}))
    assert drafted["engine"].pop("speculation") == {"draft": "ngram", "length": 2}
    plain["engine"].pop("speculation")
    assert plain == drafted
    found = Config.model_validate(yaml.safe_load(yaml.safe_dump(plain)))
    assert (found.train.alpha, found.train.steps, found.engine.max_length) == (0, 4, 192)
    assert speculation.TRANSFORM.temperature == found.tasks[0].sampling.temperature == 1.0
