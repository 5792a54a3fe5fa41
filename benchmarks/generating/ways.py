"""The ways of generating a workload at temperature 1: the embedded engine's scheduler, and transformers' two. Each says how long it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.generating.workload import Workload
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.request import Request
from rollart.engines.embedded.scheduler import Scheduler
from rollart.types import SamplingTransform

OURS, STATIC, CONTINUOUS = "rollart", "transformers generate", "transformers continuous batching"
PATIENCE_S = 120.0
"""How long continuous batching may keep still."""

_CHUNK = 1024
_PAGE = 32
_NUMBERS = count()

Way = Callable[[Workload], float]


def _settings(new: int) -> Any:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, min_new_tokens=new, eos_token_id=None, pad_token_id=0
    )


def ours(folder: Path, dtype: str) -> Way:
    """The scheduler, in this process. It gives the tokens' log-probabilities too, which transformers isn't asked for."""
    policy = PolicyModel(folder, getattr(torch, dtype), torch.device("cpu"))

    def generate(work: Workload) -> float:
        scheduler = Scheduler(policy, len(work.prompts), work.longest, _CHUNK, "0", lambda _: None)
        begun = time.perf_counter()
        requests = [
            Request(str(next(_NUMBERS)), prompt, length, SamplingTransform(1.0), at, frozenset())
            for at, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            scheduler.step()
        seconds = time.perf_counter() - begun
        _check([len(r.output_ids) for r in requests], work)
        return seconds

    return generate


def static(model: Any) -> Way:
    """`generate`: prompts padded on the left, a KV cache, and all go on until the longest has ended."""

    def generate(work: Workload) -> float:
        width = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in work.prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in work.prompts])
        begun = time.perf_counter()
        out = model.generate(ids, attention_mask=mask, generation_config=_settings(max(work.lengths)))
        seconds = time.perf_counter() - begun
        _check([out.shape[1] - width] * len(work.lengths), Workload(work.prompts, (max(work.lengths),) * len(work.lengths)))
        return seconds

    return generate


def continuous(model: Any) -> Way:
    """The manager behind `generate_batch`, with a limit of its own for each request; its start isn't counted."""

    def generate(work: Workload) -> float:
        blocks = sum(-(-(len(p) + n) // _PAGE) + 1 for p, n in zip(work.prompts, work.lengths, strict=True))
        paged = ContinuousBatchingConfig(page_size=_PAGE, num_blocks=blocks, max_batch_tokens=_CHUNK, use_cuda_graph=False)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        found: dict[str, int] = {}
        with model.continuous_batching_context_manager(_settings(max(work.lengths)), continuous_batching_config=paged, warmup=False) as manager:
            begun = time.perf_counter()
            for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
                manager.add_request(list(prompt), str(number), max_new_tokens=length, eos_token_id=-1)
            while len(found) < len(work.prompts):
                out = manager.get_result(timeout=PATIENCE_S)
                if out is None:
                    raise TimeoutError(f"continuous batching was still for {PATIENCE_S:g} s, with {len(found)} of {len(work.prompts)} requests done")
                if out.is_finished():
                    found[out.request_id] = len(out.generated_tokens)
            seconds = time.perf_counter() - begun
        _check([found[str(number)] for number in range(len(work.prompts))], work)
        return seconds

    return generate


def ways(folder: Path, dtype: str) -> dict[str, Way]:
    """By name; transformers' two share one model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
    return {OURS: ours(folder, dtype), STATIC: static(model), CONTINUOUS: continuous(model)}


def _check(lengths: list[int], work: Workload) -> None:
    if lengths != list(work.lengths):
        raise ValueError(f"asked for responses of {list(work.lengths)} tokens, got {lengths}")
