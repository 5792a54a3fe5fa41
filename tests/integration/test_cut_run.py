"""A run that samples with top-k and top-p while an n-gram draft speculates: trainer and engine agree as closely as without a cut."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.rollout.records import decode
from storage.objects.store import ObjectStore

STEPS = 4
CUT = (
    "tasks.0.sampling={temperature: 0.8, top_p: 0.9}", "tasks.1.sampling={top_k: 20, top_p: 0.95}", "engine.speculation.draft=ngram",
    "training.loss.kl=0.1", "training.batch.minibatches=2", "training.advantage.name=reinforce", "training.agreement.every=1",
    "evaluate={temperature: 0.6, min_p: 0.1, episodes: 4, every: 0}",
)  # fmt: skip

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_what_top_p_kept_is_stored_and_replayed_so_that_trainer_and_engine_agree(place: Any) -> None:
    place.finish("cut", *CUT, f"train.steps={STEPS}")
    steps = [line["train"] for line in place.metrics("cut", "step")]
    assert len(steps) == STEPS and sum(s["drift_alarm"] for s in steps) == 0
    seen = [s for s in steps if s["drift"] is not None]
    assert len(seen) >= 2 and sum(s["drift_tokens"] for s in seen) > 20
    assert max(s["drift"] for s in seen) < 1e-4 and max(s["drift_max"] for s in seen) < 1e-3
    assert all(s["entropy"] > 0 and abs(s["kl"]) < 1.0 for s in steps)
    store = ObjectStore(str(place.run("cut")))
    played = [t for path in store.list("trajectories") if path.count("/") == 1 for t in decode(store.read(path))]
    by_task: dict[tuple[str, str], list[Any]] = {}
    for t in played:
        by_task.setdefault((t.attempt.episode.purpose, t.attempt.episode.task), []).extend(t.segments)
    for (purpose, _), segments in by_task.items():
        (transform,) = {s.transform for s in segments}
        for s in segments:
            assert len(s.kept) == (s.sampled if purpose == "train" and transform.is_cut else 0)
    cuts = {purpose: {s.transform for name, found in by_task.items() if name[0] == purpose for s in found} for purpose in ("train", "evaluate")}
    assert {(c.top_k, c.top_p) for c in cuts["train"]} == {(-1, 0.9), (20, 0.95)}
    assert {(c.temperature, c.min_p) for c in cuts["evaluate"]} == {(0.6, 0.1)}
