"""How many tokens to draft, from what drafts of each length were measured to cost and to yield; and whether drafts still hit. Times nothing."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

__all__ = ["AcceptanceWatch", "DraftLengths", "candidate_lengths"]

RECENT = 15
"""Steps of one length and batch whose seconds are looked at; of them the median counts, so that a pause of the machine doesn't."""

MEMORY = 0.995
"""What a request's pass counts for in the yield once another one is known."""


def candidate_lengths(longest: int) -> tuple[int, ...]:
    """0, then the powers of two below `longest`, then `longest`: 0, 1, 2, 4, 6 for 6."""
    powers = [2**i for i in range(longest.bit_length()) if 2**i < longest]
    return (0, *powers, longest) if longest > 0 else (0,)


def _bucket(batch: int) -> int:
    """Batches are told apart by the next power of two."""
    return 1 << (batch - 1).bit_length()


@dataclass(slots=True)
class _Batches:
    """What is known of batches of about one size: the seconds of steps by length asked for, and which length is in force."""

    current: int = 0
    better: int = -1
    streak: int = 0
    since_probe: int = 0
    probing: int = 0
    probe: int = 0
    seconds: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=RECENT)))


class DraftLengths:
    """Chooses the length with the most expected tokens a second: (1 + yield of that length) / seconds of a step that asks for it.

    The yield at length k is the sum over j < k of how often the first j + 1 tokens are drafted and stand. Each length is first tried `trials`
    times for each size of batch. Then another one comes into force where it was better by `margin` in `patience` steps in a row. Every
    `probe_every` steps, `trials` steps try another length, one after the other, since costs and acceptance change: so speculation that is off
    comes on again where it pays.
    Every count that this follows is of tokens that have been decided: a length never depends on a draw that is still to be made.
    """

    def __init__(self, longest: int, margin: float = 0.05, patience: int = 8, trials: int = 5, probe_every: int = 200) -> None:
        if longest < 1:
            raise ValueError(f"longest is {longest}; leave speculation out if nothing is to be drafted")
        self.lengths = candidate_lengths(longest)
        self._margin, self._patience, self._trials, self._probe_every = margin, patience, trials, probe_every
        self._passes = [0.0] * longest
        self._stood = [0.0] * longest
        self._of: dict[int, _Batches] = defaultdict(_Batches)

    def length(self, batch: int) -> int:
        """What to ask for in the next step of `batch` requests."""
        if batch < 1:
            return 0
        at = self._of[_bucket(batch)]
        untried = [k for k in self.lengths if len(at.seconds[k]) < self._trials]
        if untried:
            return untried[0]
        return at.probe if at.probing else at.current

    def stepped(self, batch: int, asked: int, correct: Sequence[int], seconds: float | None) -> None:
        """A step asked for `asked` tokens; of each request `correct` of them stood. `seconds` None: it tells nothing of costs."""
        for stood in correct:
            for j in range(asked):
                self._passes[j] = self._passes[j] * MEMORY + 1.0
                self._stood[j] = self._stood[j] * MEMORY + (stood > j)
        if seconds is None:
            return
        at = self._of[_bucket(batch)]
        at.seconds[asked].append(seconds)
        if all(len(at.seconds[k]) >= self._trials for k in self.lengths):
            self._decide(at)

    def expected(self, length: int) -> float:
        """Tokens that a request gets of a step which asks for `length`."""
        total, known = 1.0, 1.0
        for stood, passes in zip(self._stood[:length], self._passes[:length], strict=True):
            # A length not tried lately can't yield more of its later tokens than of its earlier ones.
            known = min(known, stood / passes) if passes else known
            total += known
        return total

    def rates(self, batch: int) -> Mapping[int, float]:
        """Expected tokens a second and request, by length; of lengths that were tried with such a batch."""
        seconds = self._of[_bucket(batch)].seconds
        return {k: self.expected(k) / median(seconds[k]) for k in self.lengths if seconds[k]}

    def _decide(self, at: _Batches) -> None:
        rates = {k: self.expected(k) / median(at.seconds[k]) for k in self.lengths}
        best = max(rates, key=rates.__getitem__)
        if rates[best] > (1.0 + self._margin) * rates[at.current]:
            at.streak = at.streak + 1 if best == at.better else 1
            at.better = best
            if at.streak >= self._patience:
                at.current, at.streak, at.probing = best, 0, 0
        else:
            at.streak = 0
        if at.probing:
            at.probing -= 1
            return
        at.since_probe += 1
        if at.since_probe >= self._probe_every:
            others = [k for k in self.lengths if k != at.current]
            at.probe = next((k for k in others if k > at.probe), others[0])
            at.since_probe, at.probing = 0, self._trials


@dataclass(slots=True)
class AcceptanceWatch:
    """Alarms where drafts hit next to nothing: the mean acceptance length of `window` verifications is under `least`.

    A draft that was lost or fell behind says so nowhere else, since what is sampled stays right.
    """

    window: int = 256
    least: float = 1.02
    alarm: str | None = None
    _verified: int = 0
    _correct: int = 0

    def verified(self, drafts: int, correct: int, draft: str, draft_version: str, version: str) -> str | None:
        """`drafts` drafts (none empty) were verified and `correct` of their tokens stood. Hands back the alarm when it begins."""
        self._verified += drafts
        self._correct += correct
        if self._verified < self.window:
            return None
        length = 1.0 + self._correct / self._verified
        began = self.alarm is None and length < self.least
        self.alarm = None
        if length < self.least:
            self.alarm = (
                f"the {draft} draft of version {draft_version} hits next to nothing of policy version {version}: acceptance length {length:.2f} over "
                f"{self._verified} verifications; load a draft that follows the policy, or switch speculation off"
            )
        self._verified = self._correct = 0
        return self.alarm if began else None
