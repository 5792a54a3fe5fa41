"""A real model in the trainer: SmolLM2-135M-Instruct, where its weights are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from rollart.gguf import save_as_hugging_face
from rollart.training.batch import build_batch
from rollart.training.microbatch import micro_batches
from rollart.training.policy import Policy, load_model
from rollart.training.settings import BatchSettings, ModelSettings
from tests.smollm2 import installed_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    save_as_hugging_face(installed_file(), folder, "bfloat16")
    return folder


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.2)])  # of what is as good as impossible, bfloat16 says little
def test_its_rows_are_packed_and_say_what_padded_ones_say(
    smollm2: Path, make_trajectories, dtype: Literal["float32", "bfloat16"], bound: float
) -> None:
    policy = Policy(load_model(smollm2, ModelSettings(dtype=dtype)), packing=True)
    assert policy.packs
    trajectories = make_trajectories((2, 1))
    batch = build_batch(trajectories, {t.attempt: 1.0 for t in trajectories}, 0)
    found: dict[int, list[torch.Tensor]] = {}
    for packed in (True, False):
        for micro in micro_batches(batch.sequences, BatchSettings(), packed=packed):
            with torch.no_grad():
                values = policy.logprobs(micro.to(policy.device, policy.compute_dtype))[0]
            for member, part in zip(micro.members, values.split(list(micro.counts)), strict=True):
                found.setdefault(member, []).append(part)
    assert len(found) == len(batch.sequences) and all(len(parts) == 2 for parts in found.values())
    apart = torch.cat([one - other for one, other in found.values()]).abs().mean()
    assert float(apart) < bound, "nats a token, on average"
