"""What one pass costs that reads k new tokens of each request and wants logits after all of them, as verification of a draft does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rollart.engines.embedded.attention import SlotCache
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.packing import pack

CONTEXT = 128
Pass = Callable[[int], None]


def our_pass(policy: PolicyModel, batch: int, most: int) -> Pass:
    """A packed step of `batch` requests behind `CONTEXT` tokens each, packing included."""
    cache = SlotCache(batch, CONTEXT + most)
    tokens = np.random.default_rng(0).integers(2, policy.vocabulary, (batch, CONTEXT + most))
    slots = np.arange(batch)

    def run(start: int, new: int, wanted: int) -> None:
        counts = np.full(batch, new)
        policy.logits(pack(cache, tokens, slots, np.full(batch, start), counts, np.full(batch, wanted), policy.device))

    run(0, CONTEXT, 1)
    return lambda new: run(CONTEXT, new, new)


def their_pass(model: Any, batch: int, most: int) -> Pass:
    """The same through transformers with a cache, which is cut back after each."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(2, model.config.vocab_size, (batch, CONTEXT + most)))
    cache = DynamicCache(config=model.config)
    model(tokens[:, :CONTEXT], cache=cache, use_cache=True, logits_to_keep=1)

    def run(new: int) -> None:
        model(tokens[:, CONTEXT : CONTEXT + new], cache=cache, use_cache=True)
        cache.crop(-new)

    return run


@torch.inference_mode()
def pass_rows(name: str, folder: Path, dtype: str, batches: tuple[int, ...], new: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """A row for each batch and k: median milliseconds of `rounds` passes in turns, ours and theirs."""
    policy = PolicyModel(folder, getattr(torch, dtype), torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
    rows: list[dict[str, Any]] = []
    for batch in batches:
        both = {"ours": our_pass(policy, batch, max(new)), "theirs": their_pass(model, batch, max(new))}
        for k in new:
            seconds: dict[str, list[float]] = {side: [] for side in both}
            for _ in range(rounds + 1):
                for side, run in both.items():
                    begun = time.perf_counter()
                    run(k)
                    seconds[side].append(time.perf_counter() - begun)
            took = {side: 1000.0 * median(values[1:]) for side, values in seconds.items()}  # the first one of a shape is compiled
            rows.append(
                {"way": f"{name}, pass of {batch}", "policy": name, "batch": batch, "k": k, "ours_ms": took["ours"], "theirs_ms": took["theirs"]}
            )
    return rows
