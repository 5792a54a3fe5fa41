"""What a user can get wrong about a run: one clear line that says what to do, exit code 2, and nothing written or left running."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def finished(place: Any) -> Any:
    """A place with a short finished run called `good`."""
    place.finish("good", "train.steps=2", "evaluate.episodes=2", "evaluate.every=0")
    return place


def contents(folder: Path) -> dict[str, bytes]:
    """Everything in the run's folder but what says who runs it: a coordinator takes a run over before it reads anything of it."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.parent.name != "ledger" or b'"kind": "opened"' not in p.read_bytes()}


def copy_of(place: Any, name: str) -> Path:
    """A copy of the finished run, to be damaged."""
    shutil.copytree(place.run("good"), place.run(name))
    return place.run(name)


def one_line_of(running: Any) -> str:
    """What a refused run said: a single line, with exit code 2 and no process left."""
    assert running.wait() == 2, running.heard
    assert running.left() == []
    lines = [line for line in running.heard.splitlines() if line]
    assert len(lines) == 1, running.heard
    return lines[0]


def test_a_checkpoint_that_is_cut_short_is_named_and_nothing_is_written(finished: Any) -> None:
    folder = copy_of(finished, "short")
    commit = folder / "checkpoints" / "commits" / "0-00000002.json"
    commit.write_bytes(commit.read_bytes()[:200])
    before = contents(folder)
    said = one_line_of(finished.start("short", "train.steps=4", "evaluate.episodes=2", "evaluate.every=0", resume=True))
    assert "commits/0-00000002.json" in said and "damaged" in said and str(folder / "checkpoints") in said
    assert contents(folder) == before


@pytest.mark.slow
def test_a_checkpoint_with_one_changed_byte_is_named_and_nothing_is_written(finished: Any) -> None:
    folder = copy_of(finished, "changed")
    (chunk,) = (folder / "checkpoints" / "data").glob("v0-00000002-*/float32/c/0")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(bytes(data))
    before = contents(folder)
    said = one_line_of(finished.start("changed", "train.steps=4", "evaluate.episodes=2", "evaluate.every=0", resume=True))
    assert chunk.parent.parent.parent.name in said or "float32/c/0" in said
    assert "damaged" in said
    assert contents(folder) == before


def test_a_store_that_cannot_be_written_is_named(place: Any) -> None:
    (place.folder / "file").write_text("not a folder")
    said = one_line_of(place.start("nowhere", f"run.root={place.folder / 'file' / 'runs'}"))
    assert str(place.folder / "file") in said


def test_a_run_that_is_there_already_is_not_overwritten(finished: Any) -> None:
    before = contents(finished.run("good"))
    said = one_line_of(finished.start("good"))
    assert "run.name" in said and "--resume" in said
    assert contents(finished.run("good")) == before


def test_a_field_that_may_not_change_is_named_on_resume(finished: Any) -> None:
    said = one_line_of(finished.start("good", "run.seed=99", resume=True))
    assert "run.seed" in said


def test_a_port_in_use_is_named(place: Any) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = one_line_of(place.start("port", f"run.dashboard_port={port}"))
    assert "run.dashboard_port" in said and str(port) in said
    assert not place.run("port").exists()


def test_a_run_that_fails_before_it_began_leaves_its_name_free(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(place.folder))
    (place.folder / "broken_lake.py").write_text(
        "class Lake:\n"
        "    def reset(self, seed):\n"
        "        raise OSError('the lake is dry')\n"
        "    def step(self, action): ...\n"
        "    def close(self): ...\n"
    )
    running = place.start("dry", "tasks.0.environment=broken_lake:Lake", "tasks.0.settings={}", "warm_up.steps=0", "warm_up.episodes={}")
    assert running.wait() in (2, 3)
    assert "the lake is dry" in running.heard and running.left() == []
    assert contents(place.run("dry")) == {}
