"""What crosses borders between the parts of the system; owns shapes and invariants, does no I/O and decides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollart.kept import KeptSets
from storage.version import Version

__all__ = [
    "Attempt", "Batch", "Episode", "FinishReason", "GenerateRequest", "GenerateResult", "Group", "KVMode", "KeptSets", "Member", "Outcome", "Purpose",
    "Receipt", "SamplingTransform", "Score", "Segment", "SegmentError", "ServiceTime", "Trajectory", "Turn", "Version", "NOT_SAMPLED",
    "versions_of",
]  # fmt: skip

Purpose = Literal["train", "evaluate", "warm_up"]
"""Why an episode runs: to be trained on, to be measured, or as scripted play that warms the policy up."""

FinishReason = Literal["stop", "length", "abort"]
"""How a response ended (SGLang's `finish_reason.type`)."""

KVMode = Literal["recomputed", "kept"]
"""Whether the KV cache was recomputed or kept when weights changed in the middle of a response."""

Outcome = Literal["terminated", "truncated", "over_length", "over_age"]
"""How an attempt ended: by the environment, by its turn limit, by its token budget, or stopped since it aged out of the window."""

NOT_SAMPLED = -1
"""The version that a token carries which no policy sampled: a prompt's, or the environment's."""


class SegmentError(ValueError):
    """Ids, mask, log-probabilities and versions of a segment would not line up."""


class _Packed:
    """Travels by pickle as its field values in order: what dataclasses with slots do by default takes ten times as long, and
    tens of thousands of these cross processes in a run."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in type(self).__slots__)


@dataclass(frozen=True, slots=True)
class SamplingTransform:
    """What turns logits into the distribution that a token is drawn from: softmax(logits / temperature), then the cuts, each over what the one
    before it left, renormalised: `top_k`, then `top_p`, then `min_p`.

    temperature 0 is greedy. `top_k` -1, `top_p` 1 and `min_p` 0 switch a cut off. Stored with every segment, since the
    trainer has to apply the same transform before it compares log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def is_cut(self) -> bool:
        """Whether part of the vocabulary is left out, so that a trainer needs the kept set to replay it."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, order=True, slots=True)
class Episode(_Packed):
    """One planned start of a task's environment: its seed follows from (run, task, purpose, index), never from when it ran."""

    task: str
    index: int
    purpose: Purpose = "train"


@dataclass(frozen=True, order=True, slots=True)
class Attempt(_Packed):
    """One try (number `number`, from 0) at member `member` (0..G-1) of an episode's group."""

    episode: Episode
    member: int
    number: int = 0

    def __str__(self) -> str:
        e = self.episode
        return f"{e.purpose}/{e.task}/{e.index}/{self.member}/{self.number}"

    def retried(self) -> Attempt:
        """The next try at the same member; it draws the same random numbers."""
        return replace(self, number=self.number + 1)


@dataclass(frozen=True, slots=True)
class Turn:
    """Where one response stands in its segment, [start, end), and what came of it.

    `cached_tokens` of the prompt's tokens were served from a prefix cache. `reward` is the environment's own, for the step
    that the response caused.
    """

    start: int
    end: int
    finish_reason: FinishReason
    cached_tokens: int = 0
    reward: float = 0.0


@dataclass(slots=True)
class Segment:
    """An append-only token sequence: `ids`, `mask` (1: sampled by the policy), `logprobs` and `versions`, all of length T.

    `logprobs` are natural logarithms under `transform` at the version (a step of the trajectory's lineage or of the
    ones it descends from) that sampled the token; prompt and environment tokens have mask 0, log-probability 0 and version
    `NOT_SAMPLED`. The two append methods are the only way to grow it, so the four never differ in length. `kept` are the ids that
    the transform's cuts kept for each sampled token, in order; without places where nothing is cut or nobody asked for them.
    """

    transform: SamplingTransform = field(default_factory=SamplingTransform)
    kv: KVMode = "recomputed"
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    kept: KeptSets = field(default_factory=KeptSets)

    def __post_init__(self) -> None:
        self.check()

    def __len__(self) -> int:
        return len(self.ids)

    def check(self) -> None:
        """Raises SegmentError unless every invariant of the class holds."""
        t = len(self.ids)
        lengths = (t, len(self.mask), len(self.logprobs), len(self.versions))
        if len(set(lengths)) != 1:
            raise SegmentError(f"ids, mask, logprobs and versions have lengths {lengths}; they must be equal")
        end = 0
        for turn in self.turns:
            if not end <= turn.start <= turn.end <= t:
                raise SegmentError(f"turn [{turn.start}, {turn.end}) is out of order or outside of {t} tokens")
            end = turn.end
        if len(self.kept):
            self._check_kept([i for i, sampled in zip(self.ids, self.mask, strict=True) if sampled], self.kept)

    def _check_kept(self, sampled: Sequence[int], kept: KeptSets) -> None:
        if not self.transform.is_cut:
            raise SegmentError("kept sets were given for a segment whose transform cuts nothing")
        if wrong := kept.wrong(sampled):
            raise SegmentError(wrong)

    def append_prompt(self, ids: Sequence[int]) -> None:
        """Adds tokens that the policy did not sample."""
        n = len(ids)
        self.ids.extend(ids)
        self.mask.extend([0] * n)
        self.logprobs.extend([0.0] * n)
        self.versions.extend([NOT_SAMPLED] * n)

    def append_response(
        self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], finish_reason: FinishReason, cached_tokens: int = 0,
        kept: KeptSets | None = None,
    ) -> None:  # fmt: skip
        """Adds one sampled response as a turn; SegmentError if the lengths differ, a log-probability is not finite or over 0, a token is not in
        its kept set, or only some of the segment's tokens would have one."""
        if not len(ids) == len(logprobs) == len(versions):
            raise SegmentError(f"a response has {len(ids)} ids, {len(logprobs)} logprobs and {len(versions)} versions; they must be equal")
        for value in logprobs:
            if not math.isfinite(value) or value > 1e-6:
                raise SegmentError(f"log-probability {value} of a sampled token is not in (-inf, 0]")
        if any(v < 0 for v in versions):
            raise SegmentError("a sampled token has no version; the engine must say which weights sampled it")
        if ids and self.sampled and (kept is None) != (not len(self.kept)):
            raise SegmentError("some responses of a segment have kept sets and others have none; ask for them in all or in none")
        if kept is not None:
            self._check_kept(ids, kept)
            self.kept.extend(kept)
        start = len(self.ids)
        self.ids.extend(ids)
        self.mask.extend([1] * len(ids))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.turns.append(Turn(start, start + len(ids), finish_reason, cached_tokens))

    def reward_last_turn(self, reward: float) -> None:
        """Notes the environment's reward for the step that the last response caused."""
        self.turns[-1] = replace(self.turns[-1], reward=reward)

    @property
    def sampled(self) -> int:
        """How many of the tokens the policy sampled."""
        return sum(self.mask)


@dataclass(slots=True)
class Trajectory:
    """What one attempt yields. A changed prefix starts a new segment; a trajectory weighs the same however many it has.

    `info` is what the environment said of the whole episode (JSON values only), for verifiers and reports; `seconds` holds
    wall time by stage (`reset`, `step`, `generate`, `total`).
    """

    attempt: Attempt
    nonce: str
    lineage: int
    seed: int
    segments: list[Segment]
    outcome: Outcome
    info: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sampled(self) -> int:
        return sum(s.sampled for s in self.segments)

    @property
    def turns(self) -> list[Turn]:
        return [t for s in self.segments for t in s.turns]

    @property
    def environment_reward(self) -> float:
        """Sum of the environment's own rewards over the turns."""
        return sum(t.reward for t in self.turns)

    @property
    def version_span(self) -> tuple[int, int]:
        """First and last version (steps) that sampled a token, (NOT_SAMPLED, NOT_SAMPLED) if none did."""
        sampled = [v for s in self.segments for v in s.versions if v != NOT_SAMPLED]
        return (min(sampled), max(sampled)) if sampled else (NOT_SAMPLED, NOT_SAMPLED)


@dataclass(frozen=True, slots=True)
class Receipt(_Packed):
    """Says where an attempt's trajectory stands, durable, and what a decision about it needs; small, since it crosses Dask.

    `nonce` names the execution: a Dask re-run of the same attempt has another one, and the first recorded wins. `file` is
    relative to the run's folder, `row` the trajectory's row in it.
    """

    attempt: Attempt
    nonce: str
    lineage: int
    file: str
    row: int
    outcome: Outcome
    first_version: int
    last_version: int
    tokens: int
    sampled: int
    turns: int
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score(_Packed):
    """A verifier's word on one execution: `value`, the `parts` it is made of, and a `reason` where one helps a reader."""

    attempt: Attempt
    nonce: str
    value: float
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"the score of {self.attempt} is {self.value}; a verifier must return a finite number")


@dataclass(frozen=True, slots=True)
class Member(_Packed):
    """A finished and scored trajectory of a group."""

    receipt: Receipt
    score: Score


@dataclass(frozen=True, slots=True)
class Group:
    """The scored trajectories of one episode, as many as survived of the G that were planned."""

    episode: Episode
    members: tuple[Member, ...]

    @property
    def oldest(self) -> int:
        """The first version of the oldest member: a group is as old as that."""
        return min(m.receipt.first_version for m in self.members)

    @property
    def has_signal(self) -> bool:
        """Whether the scores differ at all; decided by their spread over the whole group, not by their mean."""
        values = [m.score.value for m in self.members]
        return max(values) - min(values) > 1e-8


@dataclass(frozen=True, slots=True)
class Batch:
    """What one training step consumes: the step that starts from version (`lineage`, `step`) and ends in `step + 1`."""

    lineage: int
    step: int
    groups: tuple[Group, ...]

    @property
    def members(self) -> list[Member]:
        return [m for g in self.groups for m in g.members]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response to sample, as SGLang's `POST /generate` takes it.

    `extra_key` separates prefix caches: requests under different keys never share KV. `seed` makes the random numbers a
    function of (seed, position), whatever else is in the batch. An engine that speculates may draft from what it has sampled under the same
    `draft_key`; others pass over it. `return_kept` asks for the ids that the transform's cuts keep at each token; SGLang passes over that.
    """

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    transform: SamplingTransform = SamplingTransform()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    extra_key: str | None = None
    draft_key: str | None = None
    return_kept: bool = False

    def to_wire(self, stream: bool = False) -> dict[str, Any]:
        """The JSON body of `POST /generate`; with `stream` the answer comes in increments, each of the new tokens alone if the engine can."""
        t = self.transform
        sampling: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens, "temperature": t.temperature, "top_p": t.top_p, "top_k": t.top_k, "min_p": t.min_p,
            "stop_token_ids": list(self.stop_token_ids), "skip_special_tokens": False,
        }  # fmt: skip
        if self.seed is not None:
            sampling["sampling_seed"] = self.seed
        body: dict[str, Any] = {
            "rid": self.rid, "input_ids": list(self.input_ids), "sampling_params": sampling,
            "return_logprob": True, "logprob_start_len": -1, "stream": stream,
        }  # fmt: skip
        if stream:
            body["incremental"] = True  # the embedded engine's own; an SGLang server is started so
        if self.extra_key is not None:
            body["extra_key"] = self.extra_key
        if self.draft_key is not None:
            body["draft_key"] = self.draft_key
        if self.return_kept:
            body["return_kept"] = True
        return body


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """Seconds of one request at its engine: until it was taken up, from then to its first token, and from there to its last."""

    queue: float
    prefill: float
    decode: float

    @classmethod
    def from_meta(cls, meta: dict[str, Any], tokens: int) -> ServiceTime | None:
        """From what SGLang tells with `--enable-metrics`: `e2e_latency`, `queue_time`, and `decode_throughput`, which is (tokens - 1) over the
        seconds from the first token to the last. None where the engine doesn't tell them."""
        if "e2e_latency" not in meta or "queue_time" not in meta or (tokens > 1 and not meta.get("decode_throughput")):
            return None
        total, queue = float(meta["e2e_latency"]), float(meta["queue_time"])
        decode = (tokens - 1) / float(meta["decode_throughput"]) if tokens > 1 else 0.0
        return cls(queue, max(total - queue - decode, 0.0), decode)


UNFINISHED: dict[str, Any] = {"type": "abort"}


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One sampled response: `ids`, their `logprobs` and the `versions` that sampled them, all of length T. `service`: how long it took there,
    if the engine says so. `kept`: what cuts kept at each token, where the engine was asked for it and tells it."""

    rid: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    service: ServiceTime | None = None
    kept: KeptSets | None = None

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> GenerateResult:
        """Reads a reply of `POST /generate`, or what an event of a streamed one says of its own tokens, which ends as an abort would.
        Spans in `weight_versions` win over the single `weight_version`.

        ValueError if the reply lacks log-probabilities or spells a version that is none: training on such tokens would be wrong.
        """
        meta = body["meta_info"]
        ids = tuple(body["output_ids"])
        logprobs = tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ())
        if len(logprobs) != len(ids):
            raise ValueError(f"the engine sent {len(ids)} ids with {len(logprobs)} log-probabilities; ask for return_logprob")
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
        versions = versions_of(spans)
        if len(versions) != len(ids):
            raise ValueError(f"the engine's version spans cover {len(versions)} of {len(ids)} tokens")
        kept = None if meta.get("output_kept") is None else KeptSets.from_wire(meta["output_kept"])
        if kept is not None and (wrong := kept.wrong(ids)):
            raise ValueError(wrong)
        return cls(
            rid=str(meta["id"]), ids=ids, logprobs=logprobs, versions=versions, finish_reason=(meta["finish_reason"] or UNFINISHED)["type"],
            prompt_tokens=int(meta.get("prompt_tokens", 0)), cached_tokens=int(meta.get("cached_tokens", 0)),
            service=ServiceTime.from_meta(meta, int(meta.get("completion_tokens", len(ids)))), kept=kept,
        )  # fmt: skip

    def after(self, before: GenerateResult) -> GenerateResult:
        """The response that began as `before` and went on as this: one prompt, this end."""
        kept = None if self.kept is None or before.kept is None else before.kept + self.kept
        return replace(
            self, ids=before.ids + self.ids, logprobs=before.logprobs + self.logprobs, versions=before.versions + self.versions,
            prompt_tokens=before.prompt_tokens, cached_tokens=before.cached_tokens, kept=kept,
        )  # fmt: skip


def versions_of(spans: Sequence[dict[str, Any]]) -> tuple[Version, ...]:
    """The version of each token, from SGLang's `weight_versions`: `{version, start, end}`, one after the other."""
    return tuple(version for s in spans for version in (Version.parse(str(s["version"])),) * (s["end"] - s["start"]))
