"""What a run's workers are told when it opens, from its configuration, and what it does to those that it finds."""

from __future__ import annotations

from pathlib import Path

import dask
import pytest
from distributed import Client, Scheduler, Worker, WorkerPlugin

from rollart.config import parse
from rollart.opening import BEYOND_S, ForClass, recovery_s, rollout_plan
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


class Nothing(WorkerPlugin):
    name = "nothing"


async def test_workers_that_a_run_sets_up_stop_to_profile_themselves_and_others_do_not() -> None:
    with dask.config.set({"distributed.worker.profile.enabled": True}):
        async with (
            Scheduler(protocol="inproc", dashboard=False) as scheduler,
            Worker(scheduler.address, resources={"PLAY": 1}, dashboard=False) as there,
            Worker(scheduler.address, resources={"OTHER": 1}, dashboard=False) as other,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            before = there.periodic_callbacks["profile"]
            await client.register_plugin(ForClass(frozenset({"PLAY"}), Nothing()))
            async with Worker(scheduler.address, resources={"PLAY": 1}, dashboard=False) as late:
                assert not before.is_running()
                assert "profile" not in there.periodic_callbacks and "profile" not in late.periodic_callbacks
                assert other.periodic_callbacks["profile"].is_running()
