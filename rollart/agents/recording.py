"""What an attempt's requests were answered with, as append-only segments; owns where each conversation stands. Renders and samples nothing.

A *point* is the end of an answer in its segment. A request whose messages begin with a conversation that ends in a point goes on from
there: in the same segment where nothing has followed yet, else in a new one that begins with the very same ids. What such a segment
shares with another one, and whatever the policy did not sample here, has mask 0, so that no token is trained on twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.types import NOT_SAMPLED, GenerateResult, SamplingTransform, Segment

__all__ = ["Opening", "Point", "Recording"]


@dataclass(slots=True)
class Point:
    """The first `end` ids of `segment`, the last of them an answer's; `text` is that answer as it was sampled, not as it was told."""

    segment: Segment
    end: int
    text: str

    @property
    def last(self) -> int:
        """The id that the answer ends with."""
        return self.segment.ids[self.end - 1]


@dataclass(slots=True)
class Opening:
    """A place for one answer: `segment` up to `start`, then `added`, ids of the new messages. `fresh`: the segment is a new one."""

    segment: Segment
    added: Sequence[int]
    fresh: bool

    @property
    def prompt(self) -> tuple[int, ...]:
        """All ids before the answer."""
        return (*self.segment.ids, *self.added)

    @property
    def cost(self) -> int:
        """Tokens that the trajectory grows by before the answer."""
        return len(self.added) + (len(self.segment) if self.fresh else 0)


@dataclass(slots=True)
class Recording:
    """The segments of one attempt, in the order in which they got their first answers. `transform`: how all of them are sampled."""

    transform: SamplingTransform
    segments: list[Segment] = field(default_factory=list)
    last: Segment | None = None
    _points: dict[str, Point] = field(default_factory=dict)
    _busy: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        """Tokens of all segments."""
        return sum(map(len, self.segments))

    @property
    def oldest(self) -> int:
        """The oldest version that sampled a token, NOT_SAMPLED before the first."""
        return min((s.versions[t.start] for s in self.segments for t in s.turns if t.end > t.start), default=NOT_SAMPLED)

    def find(self, beginnings: Sequence[str]) -> tuple[int, Point] | None:
        """The longest of `beginnings` (names of a conversation's beginnings) that ends in a point: its number and the point."""
        for number in reversed(range(len(beginnings))):
            if (point := self._points.get(beginnings[number])) is not None:
                return number, point
        return None

    def text_of(self, beginning: str) -> str | None:
        """The answer that this beginning ends in, as it was sampled; None if it ends in none."""
        point = self._points.get(beginning)
        return None if point is None else point.text

    def open(self, point: Point | None, added: Sequence[int]) -> Opening:
        """A place for an answer to `added` after `point`, or to `added` alone; nobody else gets it before it is closed."""
        if point is None:
            return Opening(Segment(self.transform), added, fresh=True)
        segment = point.segment
        if point.end == len(segment) and id(segment) not in self._busy:
            self._busy.add(id(segment))
            return Opening(segment, added, fresh=False)
        fresh = Segment(self.transform)
        fresh.append_prompt(segment.ids[: point.end])
        return Opening(fresh, added, fresh=True)

    def record(self, opening: Opening, result: GenerateResult, conversation: str, text: str) -> None:
        """Appends an answer where it was opened; from now on the conversation of that name, which it ends, can go on from there."""
        segment = opening.segment
        segment.append_prompt(opening.added)
        versions = [v.step for v in result.versions]
        segment.append_response(result.ids, result.logprobs, versions, result.finish_reason, result.cached_tokens, result.kept)
        if opening.fresh:
            self.segments.append(segment)
        self.last = segment
        self._points[conversation] = Point(segment, len(segment), text)

    def close(self, opening: Opening) -> None:
        """Whether it was recorded or not, others may go on from where the opening began."""
        self._busy.discard(id(opening.segment))
