"""Tiny models and hand-made trajectories for the trainer's tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig

from rollart.types import Attempt, Episode, SamplingTransform, Segment, Trajectory

VOCABULARY = 13


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with tied embeddings, whose norms compute in float32 whatever its dtype."""
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, which computes in float64 throughout when asked to."""
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64).save_pretrained(folder)
    return folder


def make_segment(rng: random.Random, turns: int = 2, transform: SamplingTransform | None = None, version: int = 0) -> Segment:
    segment = Segment(transform or SamplingTransform())
    for _ in range(turns):
        segment.append_prompt([rng.randrange(VOCABULARY) for _ in range(rng.randrange(2, 6))])
        n = rng.randrange(1, 6)
        ids = [rng.randrange(VOCABULARY) for _ in range(n)]
        segment.append_response(ids, [-rng.uniform(1.5, 3.5) for _ in ids], [version] * n, "stop")
    return segment


MakeTrajectories = Callable[..., list[Trajectory]]


def make_trajectories_of(sizes: tuple[int, ...] = (4, 3, 1), seed: int = 0, transform: SamplingTransform | None = None) -> list[Trajectory]:
    """Trajectories of groups of the given sizes, with one to three segments each, the same for the same seed."""
    rng = random.Random(seed)
    made = []
    for index, size in enumerate(sizes):
        for member in range(size):
            segments = [make_segment(rng, rng.randrange(1, 4), transform) for _ in range(rng.randrange(1, 4))]
            made.append(Trajectory(Attempt(Episode("toy", index), member), f"n{index}-{member}", 0, 0, segments, "terminated"))
    return made


@pytest.fixture
def make_trajectories() -> MakeTrajectories:
    """See `make_trajectories_of`."""
    return make_trajectories_of
