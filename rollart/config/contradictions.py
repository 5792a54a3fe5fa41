"""What sections of a configuration say against each other, each as one line with the fields' paths and a remedy. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollart.config.engine import LogprobSettings, SglangSection
from rollart.control.affinity import STAGES, Stage, wrong_fallbacks
from rollart.engines.sglang.drafts import lossy_drafts
from rollart.engines.sglang.flags import wrong_flags
from rollart.engines.speculative.settings import WEIGHTED
from rollart.rewards.registry import why_unknown

if TYPE_CHECKING:
    from rollart.config.whole import Config


def contradictions(config: Config) -> Iterator[str]:
    """All of them, one line each."""
    yield from _tasks(config)
    yield from _classes(config)
    yield from _stand_ins(config)
    yield from _lengths(config)
    yield from _times(config)
    yield from _determinism(config)
    yield from _speculation(config)
    yield from _drafting(config)
    yield from _sglang(config)


def _tasks(config: Config) -> Iterator[str]:
    names = [t.name for t in config.tasks]
    yield from (f"tasks: {n!r} stands twice; give every task its own name" for n in sorted({n for n in names if names.count(n) > 1}))
    yield from (f"tasks.{t.name}.reward: {unknown}" for t in config.tasks if (unknown := why_unknown(t.reward)) is not None)
    yield from (f"warm_up.episodes.{n}: no such task; use one of {names}" for n in config.warm_up.episodes if n not in names)
    yield from (f"tasks.{t.name}.system: needs policy.chat, which makes it a message" for t in config.tasks if t.system and not config.policy.chat)
    if len(config.tasks) > config.train.groups:
        yield f"train.groups: {config.train.groups} leaves a task out of {len(config.tasks)} without a group; raise it"


def _classes(config: Config) -> Iterator[str]:
    """What stages and tasks are mapped to, and what the classes themselves say."""
    hardware, stages = config.hardware, config.stages
    for stage in STAGES:
        if stage not in stages and stage not in ("logprobs", "reward"):
            yield f"stages.{stage}: missing; map it to one of {sorted(hardware)}"
    apart = [t.name for t in config.tasks if t.scored_apart and why_unknown(t.reward) is None]
    if apart and "reward" not in stages:
        yield (
            f"stages.reward: missing, and the scores of {', '.join(apart)} are futures of their own; map it to one of "
            f"{sorted(hardware)}, or set tasks[].score_in to episode where the verifier is quick"
        )
    mapped = {f"stages.{s}": c for s, c in stages.items()}
    mapped |= {f"tasks.{t.name}.classes.{s}": c for t in config.tasks for s, c in t.classes.items()}
    for path, name in mapped.items():
        if name not in hardware:
            yield f"{path}: no hardware class {name!r}; declare hardware.{name} or use one of {sorted(hardware)}"
    for task in config.tasks:
        for shared in ("train", "logprobs"):
            if shared in task.classes:
                yield f"tasks.{task.name}.classes.{shared}: it serves all tasks at once; set stages.{shared}"
    if config.logprobs != LogprobSettings() and stages.get("logprobs") in (None, stages.get("train")):
        yield "logprobs: is of workers that stages.logprobs names; name another class there than in stages.train, or leave it out"
    for name, one in hardware.items():
        computing: tuple[Stage, ...] = ("train", "logprobs", "generate")
        for stage in computing:
            if one.memory is not None and (stages.get(stage) == name or any(t.classes.get(stage) == name for t in config.tasks)):
                yield f"hardware.{name}.memory: a limit would end the {stage} workers in the middle of a step or a response; leave it out"
    resources = [one.resource for one in hardware.values()]
    for resource in sorted({r for r in resources if resources.count(r) > 1}):
        yield f"hardware: resource {resource!r} stands twice; one class, one resource"


def _stand_ins(config: Config) -> Iterator[str]:
    """The classes that stand in for others, and those that tasks may move to."""
    hardware, placement = config.hardware, config.placement
    for name in placement.classes:
        if name not in hardware:
            yield f"placement.classes: no hardware class {name!r}; declare hardware.{name} or use one of {sorted(hardware)}"
    mapped: list[tuple[Stage, str]] = [*config.stages.items(), *(pair for t in config.tasks for pair in t.classes.items())]
    mapped += [("generate", c) for c in placement.classes]
    serves = {name: sorted({s for s, c in mapped if c == name}) for name in hardware}
    fallbacks = {name: h.fallback for name, h in hardware.items() if h.fallback is not None}
    yield from (f"hardware.{n}.fallback: {wrong}" for n, wrong in wrong_fallbacks(fallbacks, hardware, serves).items())
    if placement.rule == "measured" and sum("generate" in found for found in serves.values()) < 2:
        yield "placement.rule: measured needs two classes with engines to choose from; name another one in placement.classes"
    if placement.rule == "declared" and placement.classes:
        yield "placement.classes: only placement.rule measured uses them; set it, or leave them out"


def _lengths(config: Config) -> Iterator[str]:
    longest = config.engine.max_length
    for task in config.tasks:
        if task.max_tokens > longest:
            yield f"tasks.{task.name}.max_tokens: {task.max_tokens} is over engine.max_length {longest}; raise that or lower this"
    if config.policy.tiny is not None and config.policy.tiny.max_length < longest:
        yield f"engine.max_length: {longest} is over policy.tiny.max_length {config.policy.tiny.max_length}; lower it"


def _times(config: Config) -> Iterator[str]:
    """Deadlines that would end something before another one could."""
    rollout, whole = config.rollout, config.run.step_timeout
    for t in config.tasks:
        if rollout.lease <= t.reset_timeout + t.step_timeout + t.reward_timeout:
            yield (
                f"rollout.lease: {rollout.lease:g} s end before tasks.{t.name}.reset_timeout, step_timeout and reward_timeout "
                f"({t.reset_timeout:g} s, {t.step_timeout:g} s and {t.reward_timeout:g} s) can; raise it or lower them"
            )
    if whole <= rollout.lease + rollout.most_rest:
        yield (
            f"run.step_timeout: {whole:g} s end the run before a silent attempt is tried again, rollout.lease "
            f"{rollout.lease:g} s and rollout.most_rest {rollout.most_rest:g} s later; raise it or lower them"
        )
    for name, seconds in (("silence", rollout.silence), ("worker_wait", rollout.worker_wait)):
        if seconds >= whole:
            yield f"rollout.{name}: {seconds:g} s are not under run.step_timeout, {whole:g} s, which would end the run before; lower it"


def _speculation(config: Config) -> Iterator[str]:
    speculation = config.engine.speculation
    weighted = speculation.draft in WEIGHTED
    own = speculation.draft == "head" and config.training.draft.online
    if weighted and not own and speculation.model is None and speculation.versions is None:
        yield f"engine.speculation.model: name the folder of the {speculation.draft} that drafts, or the store of its versions in versions"
    for name in ("model", "versions"):
        if not weighted and getattr(speculation, name) is not None:
            yield f"engine.speculation.{name}: is of draft {' or '.join(WEIGHTED)}, not of {speculation.draft}; change that, or leave it out"
    if speculation.follow and speculation.versions is None:
        yield "engine.speculation.follow: name the store whose versions are followed in versions, or leave it out"
    if speculation.draft == "head" and config.engine.kind == "sglang" and speculation.model is None and speculation.versions is not None:
        yield "engine.speculation.model: name the folder of a head to start SGLang's servers with, which can't begin without one"


def _drafting(config: Config) -> Iterator[str]:
    draft = config.training.draft
    for name in ("kept", "width", "heads"):
        if draft.model is not None and getattr(draft, name) is not None:
            yield f"training.draft.{name}: is of a fresh head, and training.draft.model names one that is there; leave one of them out"
    if draft.online and draft.model is None and draft.kept is not None:
        yield "training.draft.kept: which tokens are frequent isn't known before the run; train a head with `rollart draft`, and name it in model"
    if draft.online and config.training.model.shard:
        yield "training.draft.online: not with training.model.shard, where no rank has the embeddings that the head reads; leave one of them out"


def _determinism(config: Config) -> Iterator[str]:
    if not config.run.deterministic:
        return
    if config.train.alpha != 0:
        yield "run.deterministic: needs train.alpha 0, since asynchronous work ends in no fixed order"
    if config.engine.dtype != "float32" or config.training.model.dtype != "float32":
        yield "run.deterministic: needs engine.dtype and training.model.dtype float32"
    if config.engine.speculation.draft != "none":
        yield "run.deterministic: allows no engine.speculation.draft, since what is drafted decides what a pass computes"
    if config.engine.kind != "embedded":
        yield f"run.deterministic: needs engine.kind embedded, since {config.engine.kind} draws random numbers in no fixed order"


def _sglang(config: Config) -> Iterator[str]:
    engine, sglang = config.engine, config.engine.sglang
    if engine.kind != "sglang":
        if sglang != SglangSection():
            yield f"engine.sglang: is of engine.kind sglang, not of {engine.kind}; change that, or leave it out"
        return
    for task in config.tasks:
        if task.sampling.transform.is_cut:
            yield (
                f"tasks.{task.name}.sampling: top_k and top_p can't be trained on with engine.kind sglang, whose log-probabilities are over the "
                "whole vocabulary and which doesn't say what they kept; leave them at -1 and 1, or set engine.kind to embedded"
            )
    yield from (f"engine.sglang.flags.{name}: {wrong}" for name, wrong in wrong_flags(sglang.flags))
    lossy = lossy_drafts(engine.speculation.draft, engine.device, config.evaluate.transform)
    yield from (f"engine.speculation.draft: {why}" for why in lossy)
    if engine.device.startswith("cpu"):
        if sglang.tensor_parallel > 1:
            yield "engine.sglang.tensor_parallel: needs engine.device cuda; leave it at 1 on a CPU"
        if sglang.memory_fraction is not None:
            yield "engine.sglang.memory_fraction: on a CPU engine.slots says how large the KV cache is; leave it out"
