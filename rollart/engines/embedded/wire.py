"""The bodies of SGLang's HTTP calls, as far as this engine takes them; checks types and values, and refuses what it would ignore."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollart.engines.embedded.request import Request
from rollart.engines.embedded.scheduler import PauseMode
from rollart.types import SamplingTransform

__all__ = ["AbortBody", "BadRequest", "GenerateBody", "PauseBody", "UpdateBody", "explain", "reply"]

DETERMINISTIC_SEED = 42
"""What SGLang takes under deterministic inference where a request names no seed."""

_FLATTEST = 3e38
"""The largest temperature that float32 holds, roughly."""


class BadRequest(ValueError):
    """A body that cannot be served, in the words of the 400 that answers it."""


class _Body(BaseModel):
    # SGLang ignores unknown keys; wrong types are refused, never converted.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class SamplingParams(_Body):
    """`sampling_params` of a generate call, with SGLang's defaults."""

    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    n: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def refuse_unserved(self) -> None:
        """BadRequest for a parameter that would silently change nothing here."""
        neutral: dict[str, tuple[Any, ...]] = {
            "stop": (None, "", []),
            "n": (1,),
            "frequency_penalty": (0.0,),
            "presence_penalty": (0.0,),
            "repetition_penalty": (1.0,),
        }
        for name, values in neutral.items():
            if getattr(self, name) not in values:
                raise BadRequest(f"sampling_params.{name} is not served by the embedded engine; leave it out")


class GenerateBody(_Body):
    """`POST /generate`: one prompt as ids, one response. Four are this engine's own: `incremental`, whether each event of a stream holds the new
    tokens alone, as SGLang's do with `--incremental-streaming-output`; `speculate`, whether tokens may be drafted; `draft_key`,
    which requests' tokens for which others; and `return_kept`, whether the reply tells what top-k, top-p and min-p kept at each token."""

    input_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sampling_params: SamplingParams = SamplingParams()
    rid: str | None = None
    extra_key: str | None = None
    return_logprob: bool = False
    stream: bool = False
    incremental: bool = False
    speculate: bool = True
    draft_key: str | None = None
    return_kept: bool = False

    def to_request(self, vocabulary: int, max_length: int, eos: frozenset[int], deterministic: bool) -> Request:
        """The engine's form of it; BadRequest if it does not fit the model."""
        s = self.sampling_params
        s.refuse_unserved()
        if max(self.input_ids) >= vocabulary:
            raise BadRequest(f"input_ids holds {max(self.input_ids)}, the model's vocabulary ends at {vocabulary - 1}")
        if len(self.input_ids) + s.max_new_tokens > max_length:
            raise BadRequest(f"{len(self.input_ids)} prompt tokens and max_new_tokens {s.max_new_tokens} exceed the engine's length of {max_length}")
        unseeded = DETERMINISTIC_SEED if deterministic else secrets.randbits(63)
        # SGLang reads a tiny temperature as greedy; one beyond what the engine computes in is as flat as the largest there.
        temperature = 0.0 if s.temperature < 1e-6 else min(s.temperature, _FLATTEST)
        return Request(
            rid=self.rid or secrets.token_hex(16),
            prompt=tuple(self.input_ids),
            max_new_tokens=s.max_new_tokens,
            transform=SamplingTransform(temperature=temperature, top_p=s.top_p, top_k=min(s.top_k, vocabulary), min_p=s.min_p),
            seed=unseeded if s.sampling_seed is None else s.sampling_seed,
            stop_token_ids=frozenset(s.stop_token_ids or ()) | (frozenset() if s.ignore_eos else eos),
            extra_key=self.extra_key,
            streaming=self.stream,
            speculate=self.speculate,
            draft_key=self.draft_key,
            return_kept=self.return_kept,
        )


class AbortBody(_Body):
    """`POST /abort_request`: `rid` is the whole name of one request; an empty one matches nothing."""

    rid: str = ""
    abort_all: bool = False


class UpdateBody(_Body):
    """`POST /update_weights_from_disk`: `model_path` is a folder with `model.safetensors`; `selector` whose weights it holds, as SGLang's other
    updates call it: the policy's or those of the model that drafts."""

    model_path: str
    weight_version: str | None = None
    selector: Literal["target", "draft"] = "target"
    abort_all_requests: bool = False
    flush_cache: bool = True


class PauseBody(_Body):
    """`POST /pause_generation`."""

    mode: PauseMode = "abort"


def explain(error: ValidationError) -> str:
    """One line that names each wrong field."""
    return "; ".join(f"{'.'.join(str(p) for p in e['loc']) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)[:5])


def reply(request: Request, version: str, with_logprobs: bool, upto: int | None = None, since: int = 0) -> dict[str, Any]:
    """The answer of a generate call, over the first `upto` tokens where the request still runs; without those before `since`, though counts and
    spans are of all."""
    n = len(request.output_ids) if upto is None else upto
    spans = [{"version": v, "start": s, "end": min(e, n)} for v, s, e in list(request.spans) if s < n]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": n,
        "cached_tokens": request.cached_tokens,
        "weight_version": spans[-1]["version"] if spans else version,
        "weight_versions": spans,
    }
    if request.ended and upto is None:  # as SGLang with --enable-metrics
        meta |= {"e2e_latency": request.ended - request.arrived, "queue_time": request.entered - request.arrived}
        if n > 1:
            meta["decode_throughput"] = (n - 1) / max(request.ended - request.began, 1e-9)
    if request.verified:
        meta |= {
            "spec_verify_ct": request.verified, "spec_num_proposed_drafts": request.drafted, "spec_num_correct_drafts": request.correct,
            "spec_accept_length": n / request.verified, "spec_accept_rate": request.correct / max(request.drafted, 1),
        }  # fmt: skip
    ids = request.output_ids[since:n]
    if with_logprobs:
        meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(request.logprobs[since:n], ids, strict=True)]
    if request.keeps:
        meta["output_kept"] = request.kept(since, n).to_wire()
    return {"output_ids": ids, "meta_info": meta}
