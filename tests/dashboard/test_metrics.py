"""Metrics survive a reader, a torn line, a resume and a store that cannot append."""

import json
import uuid
from pathlib import Path

import fsspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollart.dashboard import events, metrics
from rollart.dashboard.metrics import MetricsError, MetricsWriter, read_metrics


@pytest.fixture(params=["local", "memory"])
def run_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


def step_line(step: int) -> dict[str, object]:
    return {"kind": "step", "step": step, "version": f"0-{step}", "time": 100.0 + step, "reward": {"frozenlake": step / 10}}


def steps(url: str) -> list[int]:
    return [line["step"] for line in read_metrics(url) if line["kind"] == "step"]


def test_a_run_without_metrics_reads_as_empty(run_url: str):
    assert read_metrics(run_url) == []


def test_lines_can_be_read_as_soon_as_they_are_written(run_url: str):
    with MetricsWriter(run_url) as writer:
        writer.write(step_line(1))
        assert [line["kind"] for line in read_metrics(run_url)] == ["start", "step"]
        assert read_metrics(run_url)[1] == step_line(1)


def test_numbers_that_json_cannot_hold_become_null(run_url: str):
    with MetricsWriter(run_url) as writer:
        writer.write({"kind": "step", "step": 1, "train": {"loss": float("nan"), "norms": [1.0, float("inf")]}})
    assert read_metrics(run_url)[1]["train"] == {"loss": None, "norms": [1.0, None]}


def test_a_second_run_in_the_same_folder_is_refused(run_url: str):
    MetricsWriter(run_url).close()
    with pytest.raises(MetricsError, match=r"metrics\.jsonl holds the metrics of an earlier run; resume"):
        MetricsWriter(run_url)


def test_resume_drops_what_the_checkpoint_does_not_hold(run_url: str):
    with MetricsWriter(run_url) as writer:
        for step in range(1, 6):
            writer.write(step_line(step))
        writer.write({"kind": "tokens", "samples": [[1.0, 2]]})
    with MetricsWriter(run_url, resume_step=3) as writer:
        writer.write(step_line(4))
    kinds = [line["kind"] for line in read_metrics(run_url)]
    assert steps(run_url) == [1, 2, 3, 4]
    assert kinds == ["start", "step", "step", "step", "tokens", "resume", "step"]


def test_resume_continues_after_the_last_whole_line(tmp_path: Path):
    with MetricsWriter(str(tmp_path)) as writer:
        writer.write(step_line(1))
    file = tmp_path / "metrics" / "metrics.jsonl"
    with file.open("ab") as torn:
        torn.write(b'{"kind":"step","st')
    assert steps(str(tmp_path)) == [1]
    with MetricsWriter(str(tmp_path), resume_step=1) as writer:
        writer.write(step_line(2))
    assert steps(str(tmp_path)) == [1, 2]
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_line_broken_in_the_middle_is_named(tmp_path: Path):
    MetricsWriter(str(tmp_path)).close()
    file = tmp_path / "metrics" / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b"{broken\n" + b'{"kind":"step","step":1}\n')
    with pytest.raises(MetricsError, match=r"line 2 of .*metrics\.jsonl is no JSON"):
        read_metrics(str(tmp_path))


def test_a_store_that_cannot_append_gets_bounded_pieces_in_order(monkeypatch: pytest.MonkeyPatch):
    url = f"memory://{uuid.uuid4().hex}/run"
    monkeypatch.setattr(metrics, "PIECE_BYTES", 400)
    with MetricsWriter(url) as writer:
        for step in range(1, 21):
            writer.write(step_line(step))
    fs, path = fsspec.core.url_to_fs(url)
    pieces = sorted(p for p in fs.ls(f"{path}/metrics", detail=False) if p.endswith(".jsonl"))
    assert len(pieces) > 3
    assert all(fs.size(piece) <= 400 for piece in pieces)
    assert steps(url) == list(range(1, 21))
    with MetricsWriter(url, resume_step=5) as writer:
        writer.write(step_line(6))
    assert steps(url) == [1, 2, 3, 4, 5, 6]


def scalars_in(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, round(event.value, 6)) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_the_rewards_and_forgets_the_abandoned_steps(tmp_path: Path):
    url = str(tmp_path)
    with MetricsWriter(url) as writer:
        for step in range(1, 4):
            writer.write(step_line(step))
        writer.write({"kind": "evaluation", "step": 3, "version": "0-3", "reward": {"frozenlake": {"mean": 0.5, "n": 200}}})
    with MetricsWriter(url, resume_step=1) as writer:
        writer.write(step_line(2) | {"reward": {"frozenlake": 0.9}})
    folder = tmp_path / "metrics"
    assert scalars_in(folder, "reward/frozenlake") == [(1, 0.1), (2, 0.9)]


def test_events_reach_a_store_that_cannot_append_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "ROLL_BYTES", 300)
    url = f"memory://{uuid.uuid4().hex}/run"
    with MetricsWriter(url) as writer:
        for step in range(1, 7):
            writer.write(step_line(step))
            writer.flush()
    fs, path = fsspec.core.url_to_fs(url)
    files = [p for p in fs.ls(f"{path}/metrics", detail=False) if "tfevents" in p]
    assert len(files) > 1
    for file in files:
        fs.get_file(file, str(tmp_path / Path(file).name))
    seen = [scalar for file in sorted(files) for scalar in _of_one_file(tmp_path / Path(file).name)]
    assert sorted(seen) == [(step, step / 10) for step in range(1, 7)]


def _of_one_file(path: Path) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    return [(e.step, round(e.value, 6)) for e in accumulator.Scalars("reward/frozenlake")] if accumulator.Tags()["scalars"] else []


def test_a_full_disk_is_told_as_the_stores_error(tmp_path: Path):
    with MetricsWriter(str(tmp_path)) as writer:
        (tmp_path / "metrics" / "metrics.jsonl").unlink()
        (tmp_path / "metrics" / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(MetricsError, match=r"can't write to .*metrics\.jsonl: No space left on device; see to that"):
            writer.write(step_line(1))


def test_a_write_that_fails_in_a_passing_way_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    url = f"memory://{uuid.uuid4().hex}/run"
    with MetricsWriter(url) as writer:
        failures = iter([ConnectionResetError("reset by peer")])
        pipe = fsspec.implementations.memory.MemoryFileSystem.pipe_file

        def failing(fs: object, path: str, data: bytes, **options: object) -> object:
            if (error := next(failures, None)) is not None:
                raise error
            return pipe(fs, path, data, **options)

        monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "pipe_file", failing)
        writer.write(step_line(1))
    assert steps(url) == [1]


def test_lines_wait_while_the_run_may_be_another_processs(run_url: str):
    ours = [True]
    with MetricsWriter(run_url, ours=lambda: ours[0]) as first:
        first.write(step_line(1))
        ours[0] = False  # it was stopped for long; meanwhile another one goes on from step 1
        first.write(step_line(2))
        with MetricsWriter(run_url, resume_step=1) as second:
            second.write(step_line(2))
            first.write({"kind": "told", "step": 2})
            assert [line["kind"] for line in read_metrics(run_url)] == ["start", "step", "resume", "step"]
    assert steps(run_url) == [1, 2]


def test_lines_that_waited_are_written_with_the_next_one(run_url: str):
    ours = [False]
    with MetricsWriter(run_url, ours=lambda: ours[0]) as writer:
        writer.write(step_line(1))
        assert read_metrics(run_url) == []
        ours[0] = True
        writer.write(step_line(2))
        assert [line["kind"] for line in read_metrics(run_url)] == ["start", "step", "step"]
