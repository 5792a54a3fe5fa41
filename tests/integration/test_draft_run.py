"""A run whose draft head learns beside its policy, and drafts for its engine: it publishes versions, the engine follows, trainer and engine agree."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.drafts.folder import read_config
from storage.version import Version
from storage.weights import WeightStore

STEPS = 4
DRAFTING = (
    "training.draft={online: true, steps: 2, publish_every: 2}", "engine.speculation={draft: head, length: 2, adaptive: false}",
    "training.agreement.every=1", "evaluate={episodes: 4, every: 0}",
)  # fmt: skip

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_a_head_that_learns_beside_the_policy_is_published_and_drafts_for_it(place: Any, tmp_path: Any) -> None:
    place.finish("drafting", *DRAFTING, f"train.steps={STEPS}")
    steps = [line["train"] for line in place.metrics("drafting", "step")]
    assert len(steps) == STEPS and sum(s["drift_alarm"] for s in steps) == 0
    assert all(len(s["draft"]["acceptance"]) == 2 and 0.0 < s["draft"]["acceptance"][0] < 1.0 for s in steps if s["optimiser_steps"])
    assert max(s["drift"] for s in steps if s["drift"] is not None) < 1e-4
    store = WeightStore(f"{place.run('drafting')}/drafts")
    assert store.versions() == [Version(0, 2), Version(0, 4)]
    (tmp_path / "config.json").write_bytes(store.file(Version(0, 4), "config.json"))
    config = read_config(tmp_path)
    tensors = store.pull(Version(0, 4))
    assert tensors["lm_head.weight"].shape == (config.kept, config.hidden)
    assert tensors["kept"].tolist() == list(range(config.vocabulary))
