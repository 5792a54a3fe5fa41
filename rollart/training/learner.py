"""Owns the policy, its optimiser and the step counter, and steps them on batches; reads no store and knows no algorithm by name."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollart.drafts.head import DraftHead
from rollart.training.advantages.finish import finished
from rollart.training.advantages.reinforce import RunningBaselines
from rollart.training.agreement import Rescored, agreed
from rollart.training.batch import TrainBatch, TrainSequence, supervised_sequences
from rollart.training.draft_trainer import DraftTrainer, fresh_head
from rollart.training.errors import StateError
from rollart.training.gradients import add_up
from rollart.training.logprobs.given import Given
from rollart.training.lora import adapters, load_base, merged
from rollart.training.losses.kl import kl_to_reference
from rollart.training.losses.mask import MASKED
from rollart.training.losses.registry import policy_loss
from rollart.training.losses.terms import LossInputs
from rollart.training.metrics import DraftMetrics, SkipReason, StepMetrics, SupervisedMetrics
from rollart.training.microbatch import MicroBatch, Totals, idle_micro_batch, micro_batches
from rollart.training.minibatch import Gradient, Minibatch, counted, marks, padding
from rollart.training.observe import Observations
from rollart.training.optimiser import Optimiser, Update
from rollart.training.policy import Policy, load_model
from rollart.training.ranks import ALONE, Ranks
from rollart.training.saving import put_back, taken
from rollart.training.settings import LearnerSettings, OptimiserSettings
from rollart.training.shares import dealt
from rollart.training.state import copies, fill, own_tensors
from rollart.types import Segment

__all__ = ["Gradient", "Learner", "Minibatch"]

log = logging.getLogger(__name__)


class Learner:
    """Trains the causal language model of a folder. `step` counts training steps: the weights it holds are those of version `step`.

    A step is `finish` (advantages), `prepare` (micro-batches, and the passes of other policies over them), and for each
    minibatch `accumulate` (its gradient) and the optimiser's update. Methods may be called from any thread; `lock` keeps them apart.

    With `ranks`, each holds a share of the batch and takes the same steps: gradients are summed, and so is what decides anything. Where
    the model is `sharded` over them, every rank runs as many passes as the one with the most.

    With `elsewhere`, other workers compute what the reference and the proximal policy say, and each step is `given` it: none is held here.
    `draft` is the draft head that learns beside the policy, where the settings have one do so: it begins as `head`, or afresh.
    """

    def __init__(self, folder: str | Path, settings: LearnerSettings, *, elsewhere: bool = False, head: DraftHead | None = None) -> None:
        torch.set_num_threads(settings.model.threads)
        self.settings, self.elsewhere = settings, elsewhere
        self.lock = threading.RLock()
        self.ranks: Ranks = ALONE
        self.sharded = False
        self.policy = self._policy(load_model(folder, settings.model))
        self.step = 0
        self.reference: Policy | None = None
        self.value_head: nn.Linear | None = None
        self.baselines = RunningBaselines()
        self.draft: DraftTrainer | None = None
        if settings.draft.online:
            self.draft_with(head)
        self.begin(settings.optimiser)

    def draft_with(self, head: DraftHead | None = None, kept: Tensor | None = None) -> DraftTrainer:
        """Takes `head`, or a fresh one over the tokens `kept` (default: all), as the draft that learns here, with an optimiser of its own. DraftError
        if it is for another policy."""
        settings = self.settings.draft
        self.draft = DraftTrainer(self.policy, head or fresh_head(self.policy, settings, self.settings.model.seed, kept), settings)
        return self.draft

    def begin(self, settings: OptimiserSettings | None = None, step: int = 0) -> None:
        """Starts training at `step` from the weights held now: fresh moments, value head and baselines, schedule at its start, reference
        policy = these weights."""
        with self.lock:
            parameters = self.policy.parameters()
            if self.settings.advantage.needs_values:
                # It starts at 0 everywhere, so that the first advantages are the scores themselves.
                self.value_head = nn.Linear(self.policy.hidden_size, 1, device=self.policy.device, dtype=self.policy.compute_dtype)
                nn.init.zeros_(self.value_head.weight)
                nn.init.zeros_(self.value_head.bias)
                parameters |= {f"value_head.{name}": p for name, p in self.value_head.named_parameters()}
            self.optimiser = Optimiser(parameters, settings or self.settings.optimiser, masters=self.settings.model.masters)
            self.step = step
            self.baselines = RunningBaselines()
            if self.reference is not None:
                fill(self.reference.model, own_tensors(self.policy.model))
            elif self.settings.needs_reference and not self.elsewhere:
                self.reference = self._policy(copy.deepcopy(self.policy.model).requires_grad_(False))

    def shard(self) -> None:
        """Spreads the policy and its reference over `ranks`, and begins with what they hold; StateError if that was done already."""
        from rollart.training.sharding import mesh_of, shard

        with self.lock:
            if self.sharded:
                raise StateError("the learner is spread over ranks already; make a new one, and load a checkpoint")
            mesh = mesh_of(self.policy.device, self.ranks.count)
            for policy in (self.policy, self.reference):
                if policy is not None:
                    shard(policy, mesh)
            self.sharded = True
            self.begin()

    # ---- a step

    def train_step(self, batch: TrainBatch, given: Given | None = None, rescored: Rescored | None = None) -> StepMetrics:
        """Trains on `batch` with one optimiser step for each of its minibatches, and counts one step, whether or not any was taken.

        What was `rescored` of it goes into its metrics. StateError unless the batch is for this learner's step, so nothing is trained on
        twice; LogprobsMismatch, before anything is stepped, if `given` is of other tokens; NonFiniteError as Optimiser.update has it, after
        which a checkpoint has to be loaded before training goes on.
        """
        with self.lock:
            if batch.step != self.step:
                raise StateError(f"the batch is for the step from version {batch.step}, but the learner is at version {self.step}")
            begun = time.perf_counter()
            torch.set_num_threads(self.settings.model.threads)
            parts = self.prepare(self.finish(batch), given)
            seen = Observations()
            skipped: list[SkipReason] = []
            taken: list[Update] = []
            losses: list[float] = []
            drafted: DraftMetrics | None = None
            for part in parts:
                reason, loss, update = self._optimise(part, batch.step, seen)
                if self.draft is not None:
                    drafted = self.draft.update(self.ranks) or drafted
                if reason is None:
                    losses.append(loss)
                    taken.append(update)
                else:
                    skipped.append(reason)
            self.step += 1
            found = seen.over(self.ranks).summary()
            here = [sum(len(s.positions) for s in batch.sequences), sum(s.inputs for s in batch.sequences), len(batch.sequences), batch.trajectories]
            sums = add_up((), [*here, *counted([m for part in parts for m in part.micros])], self.ranks)
            tokens, forwarded, sequences, trajectories, micros, places, real = map(int, sums)
            found |= agreed(found, rescored, self.settings)
            for alarm in found["alarms"]:
                log.warning("step %d: %s", batch.step, alarm)
            return StepMetrics(
                step=batch.step, loss=sum(losses) / max(1, len(losses)), grad_norm=taken[-1].grad_norm if taken else 0.0,
                lr=taken[-1].lr if taken else 0.0, optimiser_steps=len(taken), skipped=tuple(skipped),
                tokens=tokens, forwarded_tokens=forwarded, padding_share=padding(places, real), sequences=sequences, trajectories=trajectories,
                micro_batches=micros, draft=drafted, seconds=time.perf_counter() - begun, **found,
            )  # fmt: skip

    def finish(self, batch: TrainBatch) -> TrainBatch:
        """`batch` with the advantages that are trained on, for which running baselines or the value head may be needed; once a batch."""
        return finished(batch, self.settings.advantage, self.baselines, None if self.value_head is None else self.values, self.ranks)

    def prepare(self, batch: TrainBatch, given: Given | None = None) -> list[Minibatch]:
        """The minibatches of a step, with what the policy at its start and the reference policy say of their tokens, as `given` or here.

        The proximal pass is left out for the first minibatch: there the current policy is the proximal one, number by number.
        """
        parts = self.settings.batch.minibatches
        trained = dict(sorted(pair for mine in self.ranks.gather(batch.trained) for pair in mine.items()))
        in_part = dealt(list(trained), parts)
        split = batch.split(parts, list(trained))
        marked = self.ranks.gather([marks(part) for part in split])
        found = []
        for index, part in enumerate(split):
            totals = Totals.of(n for trajectory, n in trained.items() if in_part[trajectory] == index)
            signal, valued = (any(mine[index][which] for mine in marked) for which in (0, 1))
            skip = self._why_skip(totals, signal, valued)
            micros = self.cut(part, totals)
            proximal = referred = None
            if skip is None and index:
                proximal = self.proximal(micros) if given is None else given.proximal(part, micros)
            if skip is None and self.settings.needs_reference:
                referred = self.referred(micros) if given is None else given.reference(part, micros)
            found.append(Minibatch(micros, proximal, referred, skip, valued))
        return found

    def cut(self, sequences: Sequence[TrainSequence], totals: Totals | None = None) -> list[MicroBatch]:
        """The micro-batches of one minibatch, on the policy's device; `totals` are those over all ranks (default: these sequences are all)."""
        whole = self.settings.loss.over_sequences
        micros = micro_batches(sequences, self.settings.batch, packed=self.policy.packs, totals=totals, whole=whole)
        if self.sharded:
            micros += [idle_micro_batch(packed=self.policy.packs)] * (max(self.ranks.gather(len(micros))) - len(micros))
        return [m.to(self.policy.device, self.policy.compute_dtype) for m in micros]

    @torch.no_grad()
    def proximal(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probabilities [N] of each micro-batch's tokens under the policy held now."""
        return [self.policy.logprobs(m)[0] for m in micros]

    @torch.no_grad()
    def referred(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probabilities [N] of each micro-batch's tokens under the reference policy; StateError without one here."""
        if self.reference is None:
            raise StateError("there is no reference policy here; set training.loss.kl over 0, or give the step its log-probabilities")
        return [self.reference.logprobs(m)[0] for m in micros]

    @torch.no_grad()
    def values(self, sequences: Sequence[TrainSequence]) -> list[Tensor]:
        """The value head's estimate before each trained token, [n] for each sequence, on the CPU; StateError without one."""
        found: dict[int, Tensor] = {}
        for micro in self.cut(sequences):
            estimated = self._value(self.policy.score(micro, hidden=True).hidden).cpu()
            if not micro.members:
                continue
            found |= dict(zip(micro.members, estimated.split(micro.counts), strict=True))
        return [found[i] for i in range(len(sequences))]

    def accumulate(self, part: Minibatch, step: int, seen: Observations) -> Gradient:
        """Adds the gradient of the minibatch's loss to the parameters; `step` is the version that the training step starts from."""
        options = self.settings.loss
        total = torch.zeros((), device=self.policy.device, dtype=self.policy.compute_dtype)
        live = torch.zeros((), device=self.policy.device, dtype=torch.long)
        for i, micro in enumerate(part.micros):
            valued = self.value_head is not None and bool(micro.value_weights.any())
            scores = self.policy.score(micro, entropy_gradient=options.entropy > 0, hidden=valued, states=self.draft is not None)
            current, entropy = scores.logprobs, scores.entropies
            if not micro.members:
                (0.0 * current.sum()).backward()  # for the sake of the ranks that have something here
                self.optimiser.collect()
                continue
            inputs = LossInputs(
                current=current, proximal=current.detach() if part.proximal is None else part.proximal[i], behaviour=micro.behaviour,
                advantages=micro.advantages, sequence=micro.trajectory,
            )  # fmt: skip
            terms = policy_loss(inputs, options)
            per_token = terms.per_token - options.entropy * entropy
            kl = value = None
            if part.reference is not None:
                kl = kl_to_reference(current, part.reference[i], options.kl_estimator)
                per_token = per_token + options.kl * kl
            loss = (micro.weights * per_token).sum()
            if valued:
                value = self._value(scores.hidden)
                loss = loss + options.value * 0.5 * (micro.value_weights * (value - micro.returns) ** 2).sum()
            loss.backward()
            self.optimiser.collect()
            if self.draft is not None and scores.states is not None:
                self.draft.learn(micro, scores.states)
            total += loss.detach()
            kept = micro.advantages != 0
            live += (kept & ~terms.marks[MASKED] if MASKED in terms.marks else kept).sum()
            seen.add(
                inputs, terms, step - micro.versions, entropy=entropy, kl=kl, value=value,
                returns=micro.returns if valued else None, valued=micro.value_weights > 0 if valued else None,
            )  # fmt: skip
        return Gradient(total, int(live))

    def _optimise(self, part: Minibatch, step: int, seen: Observations) -> tuple[SkipReason | None, float, Update]:
        """One optimiser step, or why there was none."""
        nothing = Update(0.0, 0.0, False)
        if part.skip is not None:
            return part.skip, 0.0, nothing
        gradient = self.accumulate(part, step, seen)
        loss, live = add_up(self.optimiser.stepped, (float(gradient.loss), gradient.live), self.ranks)
        if not live and not self._regularised(part.valued):
            self.optimiser.discard()
            return "masked", 0.0, nothing
        update = self.optimiser.update(gradient.loss.new_tensor(loss))
        return None if update.taken else "non_finite", loss, update

    def _why_skip(self, totals: Totals, signal: bool, valued: bool) -> SkipReason | None:
        """Why there is nothing to learn from a minibatch: Adam would still move the weights along its old moments."""
        if not totals.tokens:
            return "no_tokens"
        return None if signal or self._regularised(valued) else "no_signal"

    def _regularised(self, valued: bool) -> bool:
        """Whether there is something in the loss beside the policy's."""
        return self.settings.loss.entropy > 0 or self.settings.loss.kl > 0 or valued

    def _value(self, hidden: Tensor | None) -> Tensor:
        """Values [N] of hidden states [N, H]."""
        if self.value_head is None or hidden is None:
            raise StateError("there is no value head; set training.advantage.name to gae")
        return self.value_head(hidden.to(self.policy.compute_dtype)).squeeze(-1)

    def _policy(self, model: nn.Module) -> Policy:
        return Policy(model, head_rows=self.settings.model.head_rows, packing=self.settings.batch.packing)

    def supervised_step(self, segments: Sequence[Segment]) -> SupervisedMetrics:
        """One optimiser step on the cross entropy of the masked tokens of `segments`; does not count as a training step."""
        with self.lock:
            begun = time.perf_counter()
            torch.set_num_threads(self.settings.model.threads)
            sequences = supervised_sequences(segments)
            totals = Totals.of(n for mine in self.ranks.gather([len(s.positions) for s in sequences]) for n in mine)
            micros = self.cut(sequences, totals)
            loss = entropy = torch.zeros((), device=self.policy.device, dtype=self.policy.compute_dtype)
            for micro in micros:
                log_p, spread = self.policy.logprobs(micro)
                part = -(micro.weights * log_p).sum()
                part.backward()
                self.optimiser.collect()
                loss = loss + part.detach()
                entropy = entropy + (micro.weights * spread).sum()
            numbers = [float(loss), float(entropy), *counted(micros)]
            whole_loss, whole_entropy, _, places, real = add_up(self.optimiser.stepped, numbers, self.ranks)
            update = self.optimiser.update(loss.new_tensor(whole_loss)) if totals.tokens else Update(0.0, 0.0, False)
            reason: tuple[SkipReason, ...] = () if update.taken else (("non_finite",) if totals.tokens else ("no_tokens",))
            return SupervisedMetrics(
                loss=whole_loss, entropy=whole_entropy, grad_norm=update.grad_norm, lr=update.lr, tokens=totals.tokens,
                sequences=totals.trajectories, padding_share=padding(places, real), skipped=reason, seconds=time.perf_counter() - begun,
            )  # fmt: skip

    # ---- weights and state

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights by their names in the model's state dict, tied ones once, under their first name; adapters are added in."""
        with self.lock:
            return copies(self.policy.model) if self.settings.model.lora is None else merged(self.policy.model)

    def adapters(self) -> dict[str, Tensor]:
        """A copy of the adapters' tensors under the names by which peft saves them; StateError without adapters."""
        if self.settings.model.lora is None:
            raise StateError("the weights themselves are trained; set training.model.lora")
        with self.lock:
            return adapters(self.policy.model)

    def load_weights(self, weights: Mapping[str, Tensor], step: int = 0) -> None:
        """Takes over the weights of version `step` and begins there, with adapters that change nothing; StateError, before anything changes,
        if they are another model's."""
        with self.lock:
            (fill if self.settings.model.lora is None else load_base)(self.policy.model, weights)
            self.begin(step=step)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that a resumed learner needs, copied: arrays (`weights/`, `optimiser/` with its masters, `reference/`, `value_head/`,
        `draft/`, `rng/torch`) and a JSON document; `reference/` where it is held here."""
        with self.lock:
            return taken(self)

    def load_state(self, arrays: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave, bit for bit; StateError if it belongs to another model or lacks what these settings need."""
        with self.lock:
            put_back(self, arrays, document)
