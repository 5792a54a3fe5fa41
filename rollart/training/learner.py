"""Owns the policy, its optimiser and the step counter, and steps them on batches; reads no store and knows no algorithm by name."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollart.training.batch import TrainBatch, TrainSequence, supervised_sequences
from rollart.training.errors import StateError
from rollart.training.losses.registry import LOSSES
from rollart.training.losses.terms import LossInputs, kl_to_reference
from rollart.training.metrics import SkipReason, StepMetrics, SupervisedMetrics
from rollart.training.microbatch import MicroBatch, micro_batches
from rollart.training.observe import Observations
from rollart.training.optimiser import Optimiser, Update
from rollart.training.policy import Policy, load_model
from rollart.training.settings import LearnerSettings, OptimiserSettings
from rollart.types import Segment

__all__ = ["Learner"]


class Learner:
    """Trains the causal language model of a folder. `step` counts training steps: the weights it holds are those of version `step`.

    Methods may be called from any thread; `lock` keeps them apart.
    """

    def __init__(self, folder: str | Path, settings: LearnerSettings) -> None:
        torch.set_num_threads(settings.model.threads)
        self.settings = settings
        self.lock = threading.RLock()
        self.policy = Policy(load_model(folder, settings.model))
        self.step = 0
        self.reference: Policy | None = None
        self.begin(settings.optimiser)

    def begin(self, settings: OptimiserSettings | None = None, step: int = 0) -> None:
        """Starts training at `step` from the weights held now: fresh moments, schedule at its start, reference policy = these weights."""
        with self.lock:
            self.optimiser = Optimiser(self.policy.parameters(), settings or self.settings.optimiser)
            self.step = step
            self.reference = Policy(copy.deepcopy(self.policy.model).requires_grad_(False)) if self.settings.loss.kl > 0 else None

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """Trains on `batch` with one optimiser step for each of its minibatches, and counts one step, whether or not any was taken.

        StateError unless the batch is for this learner's step, so nothing is trained on twice; NonFiniteError as Optimiser.update has it,
        after which a checkpoint has to be loaded before training goes on.
        """
        with self.lock:
            if batch.step != self.step:
                raise StateError(f"the batch is for the step from version {batch.step}, but the learner is at version {self.step}")
            begun = time.perf_counter()
            torch.set_num_threads(self.settings.model.threads)
            parts = batch.split(self.settings.batch.minibatches)
            cut = [self._cut(part) for part in parts]
            # The proximal policy is the one at the start of the step. For the first minibatch that is the current one.
            proximal: list[list[Tensor] | None] = [None, *([self._score(m) for m in micros] for micros in cut[1:])]
            seen = Observations()
            skipped: list[SkipReason] = []
            taken: list[Update] = []
            losses: list[float] = []
            for part, micros, centre in zip(parts, cut, proximal, strict=True):
                reason = self._why_skip(part)
                if reason is not None:
                    skipped.append(reason)
                    continue
                loss, update = self._optimise(micros, centre, batch.step, seen)
                if update.taken:
                    losses.append(loss)
                    taken.append(update)
                else:
                    skipped.append("non_finite")
            self.step += 1
            every = [m for micros in cut for m in micros]
            return StepMetrics(
                step=batch.step, loss=sum(losses) / max(1, len(losses)), grad_norm=taken[-1].grad_norm if taken else 0.0,
                lr=taken[-1].lr if taken else 0.0, optimiser_steps=len(taken), skipped=tuple(skipped),
                tokens=sum(len(s.positions) for s in batch.sequences), forwarded_tokens=sum(s.inputs for s in batch.sequences),
                padding_share=_padding(every), sequences=len(batch.sequences), trajectories=batch.trajectories, micro_batches=len(every),
                seconds=time.perf_counter() - begun, **seen.summary(),
            )  # fmt: skip

    def supervised_step(self, segments: Sequence[Segment]) -> SupervisedMetrics:
        """One optimiser step on the cross entropy of the masked tokens of `segments`; does not count as a training step."""
        with self.lock:
            begun = time.perf_counter()
            torch.set_num_threads(self.settings.model.threads)
            sequences = supervised_sequences(segments)
            micros = self._cut(sequences)
            loss = entropy = torch.zeros((), device=self.policy.device, dtype=self.policy.compute_dtype)
            for micro in micros:
                log_p, spread = self.policy.logprobs(micro)
                part = -(micro.weights * log_p).sum()
                part.backward()
                loss = loss + part.detach()
                entropy = entropy + (micro.weights * spread).sum()
            update = self.optimiser.update(loss) if micros else Update(0.0, 0.0, False)
            reason: tuple[SkipReason, ...] = () if update.taken else (("non_finite",) if micros else ("no_tokens",))
            return SupervisedMetrics(
                loss=float(loss), entropy=float(entropy), grad_norm=update.grad_norm, lr=update.lr,
                tokens=sum(len(s.positions) for s in sequences), sequences=len(sequences), padding_share=_padding(micros),
                skipped=reason, seconds=time.perf_counter() - begun,
            )  # fmt: skip

    def accumulate(self, micros: Sequence[MicroBatch], proximal: Sequence[Tensor] | None, step: int, seen: Observations) -> Tensor:
        """Adds the gradient of the minibatch's loss to the parameters and returns the loss, a scalar without gradient.

        `proximal` holds the log-probabilities [N] of each micro-batch at the start of the step, None if that is now.
        """
        options = self.settings.loss
        total = torch.zeros((), device=self.policy.device, dtype=self.policy.compute_dtype)
        for i, micro in enumerate(micros):
            current, entropy = self.policy.logprobs(micro, entropy_gradient=options.entropy > 0)
            inputs = LossInputs(
                current=current, proximal=current.detach() if proximal is None else proximal[i], behaviour=micro.behaviour,
                advantages=micro.advantages, sequence=micro.sequence,
            )  # fmt: skip
            terms = LOSSES[options.name](inputs, options)
            per_token = terms.per_token - options.entropy * entropy
            kl = None
            if self.reference is not None:
                with torch.no_grad():
                    reference, _ = self.reference.logprobs(micro)
                kl = kl_to_reference(current, reference)
                per_token = per_token + options.kl * kl
            loss = (micro.weights * per_token).sum()
            loss.backward()
            total += loss.detach()
            seen.add(inputs, terms, entropy, kl, step - micro.versions)
        return total

    def _optimise(self, micros: list[MicroBatch], proximal: list[Tensor] | None, step: int, seen: Observations) -> tuple[float, Update]:
        total = self.accumulate(micros, proximal, step, seen)
        return float(total), self.optimiser.update(total)

    def _cut(self, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        return [m.to(self.policy.device, self.policy.compute_dtype) for m in micro_batches(sequences, self.settings.batch)]

    @torch.no_grad()
    def _score(self, micro: MicroBatch) -> Tensor:
        return self.policy.logprobs(micro)[0]

    def _why_skip(self, sequences: Sequence[TrainSequence]) -> SkipReason | None:
        """Why there is nothing to learn from a minibatch: Adam would still move the weights along its old moments."""
        if not sequences:
            return "no_tokens"
        regularised = self.settings.loss.entropy > 0 or self.settings.loss.kl > 0
        if not regularised and not any(bool(s.advantages.any()) for s in sequences):
            return "no_signal"
        return None

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights by their names in the model's state dict, tied ones once, under their first name."""
        with self.lock:
            return {name: value.detach().clone() for name, value in _tensors(self.policy.model).items()}

    def load_weights(self, weights: Mapping[str, Tensor], step: int = 0) -> None:
        """Takes over the weights of version `step` and begins there; StateError, before anything changes, if they are another model's."""
        with self.lock:
            _fill(self.policy.model, weights)
            self.begin(step=step)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that a resumed learner needs, copied: arrays (`weights/`, `optimiser/`, `reference/`, `rng/torch`) and a JSON document."""
        with self.lock:
            arrays = {f"weights/{name}": value for name, value in self.weights().items()}
            arrays |= {f"optimiser/{name}": value for name, value in self.optimiser.arrays().items()}
            if self.reference is not None:
                arrays |= {f"reference/{name}": value.clone() for name, value in _tensors(self.reference.model).items()}
            arrays["rng/torch"] = torch.get_rng_state()
            return arrays, {"step": self.step, "optimiser": self.optimiser.counts()}

    def load_state(self, arrays: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave, bit for bit; StateError if it belongs to another model or lacks what these settings need."""
        with self.lock:
            if "rng/torch" not in arrays or not {"step", "optimiser"} <= set(document):
                raise StateError("the learner's state lacks rng/torch, step or optimiser; it is not a checkpoint of a learner")
            if self.reference is not None:
                _fill(self.reference.model, _under("reference/", arrays))
            _fill(self.policy.model, _under("weights/", arrays))
            self.optimiser.load(_under("optimiser/", arrays), document["optimiser"])
            self.step = int(document["step"])
            torch.set_rng_state(arrays["rng/torch"])


def _under(prefix: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's own parameters and stored buffers (not copies), each once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def _fill(model: torch.nn.Module, values: Mapping[str, Tensor]) -> None:
    own = _tensors(model)
    if set(own) != set(values):
        raise StateError(f"the weights are another model's: {sorted(set(own) ^ set(values))[:3]} are missing or too many")
    for name, value in values.items():
        if value.shape != own[name].shape:
            raise StateError(f"weight {name} has shape {tuple(value.shape)}, the model's has {tuple(own[name].shape)}")
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def _padding(micros: Sequence[MicroBatch]) -> float:
    places = sum(m.ids.numel() for m in micros)
    return 1.0 - sum(m.real for m in micros) / places if places else 0.0
