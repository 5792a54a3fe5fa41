"""A draft head learns from what a run has sampled: the start of speculative decoding with a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollart.drafting import Drafting
from storage.version import Version


@dataclass(frozen=True, slots=True)
class Drafted:
    """The head's acceptance by drafted token on episodes held out, `before` and `after`, and where it was published."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    store: str
    version: Version


def draft(drafting: Drafting, tell: Callable[[str], None] = lambda _: None) -> Drafted:
    """Measures the head, trains it for `draft_training.steps` steps, measures it again, and publishes it."""
    before = drafting.acceptance()
    steps = drafting.settings.steps
    for step in range(steps):
        metrics = drafting.learn(step)
        if metrics is not None and step % max(1, steps // 10) == 0:
            tell(f"step {step}/{steps}: loss {metrics.loss:.3f}, acceptance {' '.join(f'{a:.3f}' for a in metrics.acceptance)}")
    after = drafting.acceptance() if steps else before
    store, version = drafting.publish(before, after)
    return Drafted(before, after, store, version)
