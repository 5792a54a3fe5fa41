"""The tiny policy, the embedded engine that serves it, and an attempt on it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollart.agents.rendering import Rendering
from rollart.engines.client import EngineClient
from tests.agents.serving import Served, save_policy, serve


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def engine(policy: Path) -> Iterator[str]:
    """The URL of an embedded engine that serves `policy` as version 0-0."""
    command = [sys.executable, "-m", "rollart.engines.embedded", "--model", str(policy), "--weight-version", "0-0", "--slots", "16", "--chunk", "256"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdin is not None and process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 90.0)
        assert ready, "the engine did not come up"
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        finally:
            process.kill()


@pytest.fixture
def rendering(policy: Path) -> Rendering:
    return Rendering.of_folder(policy)


@pytest.fixture
async def served(rendering: Rendering, engine: str) -> AsyncIterator[Served]:
    """An attempt on the real engine."""
    async with EngineClient() as client, serve(rendering, lambda request: client.generate(engine, request)) as found:
        yield found
