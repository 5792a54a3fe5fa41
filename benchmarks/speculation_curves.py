"""Whether drafts change what is learned: the quick start's tasks trained without them, with n-grams, and with a model that drafts, over five seeds.

The model that drafts is the policy as the first seed's warm-up left it: further off with every step, so that much is refused and drawn
anew. Lossless means that the paired difference of the final rewards has 0 in its 95 % interval over the seeds, as `benchmarks.staleness` has it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.outcome import Benchmark, Outcome
from benchmarks.staleness import draw, headline
from benchmarks.staleness_runs import QUICK, Scale, Way, rows

KEPT = Path("runs") / "speculation"
LENGTH = 2
"""Responses have two to four tokens."""


def ways(draft: Path) -> tuple[Way, ...]:
    """The three arms; `draft` is the folder of the model that drafts. Drafts are never switched off for being slow here."""

    def drafted(name: str, **settings: str) -> Way:
        fields = {"length": str(LENGTH), "adaptive": "false", **settings}
        return Way(name, ("train.alpha=0", *(f"engine.speculation.{field}={value}" for field, value in fields.items())))

    return Way("plain", ("train.alpha=0",)), drafted("ngram drafts", draft="ngram"), drafted("model drafts", draft="model", model=str(draft))


def measure(quick: bool) -> Outcome:
    """Fifteen runs, kept in `runs/speculation` as they end; quick: one short seed, which shows that it runs."""
    scale, kept = (QUICK, Path(f"{KEPT}-quick").resolve()) if quick else (Scale(), KEPT.resolve())
    draft = kept / "draft"
    plain, *others = ways(draft)
    rows([plain], scale, kept)
    if not draft.exists():
        program = str(Path(sys.executable).with_name("rollart"))
        subprocess.run([program, "weights", "export", str(kept / "warm-up-seed0" / "weights"), str(draft)], check=True, stdout=subprocess.DEVNULL)
    found = rows([plain, *others], scale, kept)
    return Outcome(found, headline(found))


BENCHMARK = Benchmark("speculation_curves", "Rewards with and without drafts, from the same start", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
