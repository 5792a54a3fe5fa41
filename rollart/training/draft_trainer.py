"""Trains a draft head on what a policy's passes computed anyway; owns the head and its optimiser, and changes nothing of the policy.

Hidden states, embeddings and targets are taken detached, and the head's gradient is cleared and clipped by itself: the policy's own gradient is,
bit for bit, what it would be without a head.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollart.drafts.config import HeadConfig
from rollart.drafts.head import DraftHead
from rollart.drafts.loss import Texts, draft_loss
from rollart.training.errors import NonFiniteError
from rollart.training.gradients import add_up
from rollart.training.metrics import DraftMetrics
from rollart.training.microbatch import MicroBatch
from rollart.training.optimiser import Optimiser
from rollart.training.policy import Policy
from rollart.training.ranks import ALONE, Ranks
from rollart.training.settings import DraftSettings
from rollart.training.state import check_fits, copies, fill, under

__all__ = ["DraftTrainer", "fresh_head"]

log = logging.getLogger(__name__)


def fresh_head(policy: Policy, settings: DraftSettings, seed: int, kept: Tensor | None = None) -> DraftHead:
    """A head for `policy`, of the sizes in `settings`, over the tokens `kept` (default: all), whose output layer begins as the policy's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = policy.model
        many = None if kept is None else len(kept)
        head = DraftHead(HeadConfig.of(model.config, kept=many, width=settings.width, heads=settings.heads), kept)
    head.start_from(policy.output_weight.detach().float().cpu())
    return head


class DraftTrainer:
    """A head in fp32 on the policy's device, and its own AdamW; `learn` on each micro-batch, then `update`."""

    def __init__(self, policy: Policy, head: DraftHead, settings: DraftSettings) -> None:
        head.config.refuse_misfit(policy.model.config)
        self.settings = settings
        self.policy = policy
        self.head = head.float().to(policy.device)
        self.optimiser = Optimiser(dict(self.head.named_parameters()), settings.optimiser)
        self.stopped = False
        self._sums = [0.0] * (1 + 3 * settings.steps)
        self._seconds = 0.0

    def learn(self, micro: MicroBatch, states: Tensor) -> None:
        """Adds the gradient of the loss on a micro-batch of which the policy's hidden states are `states` [B * T, H]."""
        if self.stopped or not micro.members:
            return
        begun = time.perf_counter()
        self._counted(micro, states.detach()).backward()
        self._seconds += time.perf_counter() - begun

    @torch.no_grad()
    def measure(self, micro: MicroBatch, states: Tensor) -> None:
        """What `learn` counts, without a gradient."""
        if micro.members:
            self._counted(micro, states)

    def update(self, ranks: Ranks = ALONE) -> DraftMetrics | None:
        """One optimiser step along what was learnt since the last, over all ranks; None if that was nothing, or not finite."""
        begun = time.perf_counter()
        sums = add_up(self.optimiser.stepped, self._sums, ranks)
        if not any(sums[-self.settings.steps :]):
            self._clear()
            return None
        try:
            update = self.optimiser.update(torch.tensor(sums[0]))
        except NonFiniteError as error:
            # A draft costs speed at most: the run goes on without one that learns, and with the versions that there are.
            log.warning("the draft head learns no more: %s", error)
            self.stopped = True
            self._clear()
            return None
        if not update.taken:
            self._clear()
            return None
        return self._told(sums, update.grad_norm, self._seconds + time.perf_counter() - begun)

    def measured(self) -> DraftMetrics | None:
        """What `measure` counted since the last `update` or `measured`; None if that was nothing."""
        return self._told(self._sums, 0.0, 0.0) if any(self._sums[-self.settings.steps :]) else None

    def weights(self) -> dict[str, Tensor]:
        """Copies of the head's tensors, `kept` among them."""
        return copies(self.head)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of all that going on needs: arrays (`head/`, `optimiser/`) and what JSON can hold."""
        arrays = copies(self.head, "head/") | {f"optimiser/{name}": value for name, value in self.optimiser.arrays().items()}
        return arrays, self.optimiser.counts()

    def check(self, arrays: Mapping[str, Tensor]) -> None:
        """StateError unless `arrays` are those of a head like this one."""
        check_fits(self.head, under("head/", arrays))

    def load(self, arrays: Mapping[str, Tensor], counts: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave, bit for bit; StateError if it is another head's."""
        fill(self.head, under("head/", arrays))
        self.optimiser.load(under("optimiser/", arrays), counts)
        self._clear()

    def _counted(self, micro: MicroBatch, states: Tensor) -> Tensor:
        """The loss on a micro-batch, whose figures are added to the sums."""
        found = draft_loss(self.head, self._texts(micro, states), self.settings.steps)
        sums = [float(found.loss.detach()), *found.entropies, *found.accepted, *found.weight]
        self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)]
        return found.loss

    def _clear(self) -> None:
        self._sums = [0.0] * (1 + 3 * self.settings.steps)
        self._seconds = 0.0

    def _told(self, sums: list[float], grad_norm: float, seconds: float) -> DraftMetrics:
        steps = self.settings.steps
        entropies, accepted, weight = (sums[1 + i * steps : 1 + (i + 1) * steps] for i in range(3))
        shares = tuple(a / w if w else 0.0 for a, w in zip(accepted, weight, strict=True))
        nats = tuple(e / w if w else 0.0 for e, w in zip(entropies, weight, strict=True))
        self._clear()
        return DraftMetrics(loss=sums[0], entropies=nats, acceptance=shares, grad_norm=grad_norm, seconds=seconds)

    @torch.no_grad()
    def _texts(self, micro: MicroBatch, states: Tensor) -> Texts:
        ids, hidden, rows, places = _apart(micro, states)
        seen = places > 0  # the head says nothing of a sequence's second token
        index, temperature = micro.index[seen], micro.temperature[seen]
        targets = self.policy.probabilities(states.index_select(0, index), temperature if micro.tempered else None, self.head.kept)
        return Texts(hidden.float(), self.policy.embed(ids).float(), rows[seen], places[seen], targets, micro.weights[seen].float())


def _apart(micro: MicroBatch, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids [B, T] and hidden states [B, T, H] of the sequences, padded on their right, and where in them each trained token is predicted: its row
    and its place there, [N]."""
    if micro.layout is None:
        width = micro.ids.shape[1]
        return micro.ids, states.view(*micro.ids.shape, -1), micro.index // width, micro.index % width
    positions = micro.layout.positions[0]
    owner = (positions == 0).cumsum(0) - 1
    lengths = torch.bincount(owner).tolist()
    ids = pad_sequence(list(micro.ids[0].split(lengths)), batch_first=True)
    return ids, pad_sequence(list(states.split(lengths)), batch_first=True), owner[micro.index], positions[micro.index]
