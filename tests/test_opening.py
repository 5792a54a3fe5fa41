"""What a run's workers are told when it opens, from its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.config import parse
from rollart.opening import BEYOND_S, recovery_s, rollout_plan
from rollart.run import RunFolder

QUICKSTART = (Path(__file__).parent.parent / "flows" / "configs" / "quickstart.yaml").read_text()


@pytest.mark.parametrize(
    ("engine", "seconds"), [("{kind: sglang, max_length: 256, sglang: {start_timeout: 900}}", 1020.0), ("{max_length: 256}", 120.0)]
)
def test_a_lost_engine_is_waited_for_as_long_as_its_server_may_take_to_start_and_turns_wait_longer(
    tmp_path: Path, engine: str, seconds: float
) -> None:
    config = parse(QUICKSTART, [f"engine={engine}"])
    assert recovery_s(config) == seconds
    assert rollout_plan(config, RunFolder(str(tmp_path)), 0, 0, 1).engine_wait_s == seconds + BEYOND_S
