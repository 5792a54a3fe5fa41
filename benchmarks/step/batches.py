"""The batches that both trainers step on: token ids and scores drawn from a seed, as plain lists and as the system's own batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.types import Attempt, Batch, Episode, Group, Member, Receipt, Score, Segment, Trajectory

__all__ = ["Drawn", "Shape", "draw_batch"]


@dataclass(frozen=True, slots=True)
class Shape:
    """`groups` prompts of `members` completions each; prompts of `prompt` tokens and completions of `completion`, drawn evenly between
    least and most, both included."""

    groups: int
    members: int
    prompt: tuple[int, int]
    completion: tuple[int, int]

    @property
    def sequences(self) -> int:
        return self.groups * self.members


@dataclass(frozen=True, slots=True)
class Drawn:
    """One entry a sequence, a group's next to each other; ids are under `vocabulary`, scores 0 or 1 and both in every group."""

    members: int
    prompts: list[list[int]]
    completions: list[list[int]]
    scores: list[float]

    @property
    def trained(self) -> int:
        """Tokens that are trained on: the completions'."""
        return sum(map(len, self.completions))

    def trajectories(self, logprobs: Sequence[Sequence[float]] | None = None) -> list[Trajectory]:
        """As version 0 would have sampled them, with these `logprobs` (default: 0)."""
        made = []
        for i, (prompt, completion) in enumerate(zip(self.prompts, self.completions, strict=True)):
            segment = Segment()
            segment.append_prompt(prompt)
            segment.append_response(completion, logprobs[i] if logprobs else [0.0] * len(completion), [0] * len(completion), "stop")
            attempt = Attempt(Episode("drawn", i // self.members), i % self.members)
            made.append(Trajectory(attempt, f"n{i}", 0, 0, [segment], "terminated"))
        return made

    def batch(self, trajectories: Sequence[Trajectory], step: int) -> Batch:
        """These trajectories, scored, for the step from version `step`; receipts name their rows."""
        groups: dict[Episode, list[Member]] = {}
        for row, (t, score) in enumerate(zip(trajectories, self.scores, strict=True)):
            receipt = Receipt(t.attempt, t.nonce, 0, "file", row, t.outcome, 0, 0, len(t.segments[0]), t.sampled, 1)
            groups.setdefault(t.attempt.episode, []).append(Member(receipt, Score(t.attempt, t.nonce, score)))
        return Batch(0, step, tuple(Group(episode, tuple(members)) for episode, members in groups.items()))


def draw_batch(shape: Shape, vocabulary: int, seed: int = 0) -> Drawn:
    """The same for the same arguments. All members of a group share their prompt, as samples of one episode do."""
    rng = random.Random(seed)
    ids = range(2, vocabulary)  # 0 and 1 are padding and end in the tiny policies
    prompts: list[list[int]] = []
    for _ in range(shape.groups):
        prompt = rng.choices(ids, k=rng.randint(*shape.prompt))
        prompts += [prompt] * shape.members
    completions = [rng.choices(ids, k=rng.randint(*shape.completion)) for _ in range(shape.sequences)]
    return Drawn(shape.members, prompts, completions, [float(i % shape.members % 2) for i in range(shape.sequences)])
