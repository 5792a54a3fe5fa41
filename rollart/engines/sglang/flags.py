"""Which flags of SGLang's server a configuration may add, and why not the others; knows names and values, starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["Flag", "flag_arguments", "wrong_flags"]

Flag = str | int | float | bool
"""True stands for a flag without a value, False for leaving it out."""

OWN: Mapping[str, str] = {
    "model-path": "policy.model", "model": "policy.model", "tokenizer-path": "policy.model", "tokenizer-mode": "policy.model",
    "skip-tokenizer-init": "nothing: requests are token ids", "load-format": "nothing: weights come from the store",
    "weight-version": "nothing: versions come from the store", "served-model-name": "nothing: no request names a model",
    "host": "nothing: it is the worker's address", "port": "nothing: a free one is taken", "device": "engine.device", "base-gpu-id": "engine.device",
    "dtype": "engine.dtype", "context-length": "engine.max_length", "max-running-requests": "engine.slots", "max-total-tokens": "engine.slots",
    "chunked-prefill-size": "engine.chunk", "mem-fraction-static": "engine.sglang.memory_fraction", "tp-size": "engine.sglang.tensor_parallel",
    "tensor-parallel-size": "engine.sglang.tensor_parallel", "tp": "engine.sglang.tensor_parallel",
    "attention-backend": "engine.sglang.attention_backend", "enable-metrics": "nothing: it is always on",
    "stream-interval": "nothing: it is how much of a response a lost engine may cost",
    "incremental-streaming-output": "nothing: it is always on",
    "grammar-backend": "nothing: requests have no grammar", "log-level": "nothing: it is warning",
    "skip-server-warmup": "nothing: an engine is announced once it has generated", "api-key": "nothing: the engines' network is trusted",
    "admin-api-key": "nothing: the engines' network is trusted", "config": "the fields of engine, one by one",
    "speculative-algorithm": "engine.speculation.draft", "speculative-num-steps": "engine.speculation.length",
    "speculative-num-draft-tokens": "engine.speculation.length", "speculative-eagle-topk": "nothing: one drafted token follows another",
    "speculative-draft-model-path": "engine.speculation.model", "speculative-draft-model": "engine.speculation.model",
    "speculative-draft-load-format": "engine.speculation.model", "uno-lora-path": "engine.speculation.draft",
    "speculative-ngram-max-bfs-breadth": "nothing: one drafted token follows another",
    "speculative-ngram-capacity": "engine.speculation.memory", "speculative-adaptive": "engine.speculation.adaptive",
    "speculative-adaptive-config": "engine.speculation.adaptive",
    "speculative-use-rejection-sampling": "nothing: it is on where a draft's probabilities are known",
}  # fmt: skip
"""Flags that the system sets, and what sets them in a configuration."""

ALTERED = "it would sample from another distribution than the policy's"
LOSSY: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "quantization", "quantization-param-path", "modelopt-quant", "quantize-and-serve", "torchao-config", "rl-quant-profile",
            "json-model-override-args", "preferred-sampling-params", "enable-custom-logit-processor", "enable-watermark", "lora-paths",
            "custom-weight-loader", "forward-hooks", "allow-auto-truncate", "dllm-algorithm", "enable-tf32-matmul", "enable-int8-mamba-checkpoint",
        ),
        ALTERED,
    ),
    "kv-cache-dtype": "a cache in another format than the weights' samples from another distribution than the policy's",
    "speculative-accept-threshold-single": "drafts would be accepted that the policy would not sample",
    "speculative-accept-threshold-acc": "drafts would be accepted that the policy would not sample",
    "disaggregation-mode": "a version from the store reaches one server, not a pair of them",
    "data-parallel-size": "a worker owns one engine; add generation workers instead",
    "dp-size": "a worker owns one engine; add generation workers instead",
    "nnodes": "an engine is of one host; use tensor parallelism within it",
    "weight-cache-mode": "weights that are shared with other servers can't be updated",
}  # fmt: skip
"""Flags that no run may set, and why."""


def wrong_flags(flags: Mapping[str, Flag]) -> Iterator[tuple[str, str]]:
    """The flags, by name without dashes in front, that can't be added, each with the reason and a remedy."""
    for name in flags:
        if name != name.strip().lstrip("-") or "_" in name or "=" in name or " " in name:
            yield name, "write the flag's long name without the dashes in front, such as schedule-policy"
        elif name in OWN:
            yield name, f"the system sets it; in a configuration it follows from {OWN[name]}"
        elif name in LOSSY:
            yield name, f"{LOSSY[name]}; leave it out"
        elif any(known.startswith(name) for known in (*OWN, *LOSSY)):
            yield name, "it could stand for a flag that is refused; write the whole name of the one that is meant"


def flag_arguments(flags: Mapping[str, Flag]) -> list[str]:
    """The flags as arguments of a command."""
    found: list[str] = []
    for name, value in flags.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not False:
            found += [f"--{name}", str(value)]
    return found
