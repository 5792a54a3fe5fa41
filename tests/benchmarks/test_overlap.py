"""The overlap benchmark's arithmetic and files, on summaries whose figures are known; the runs themselves are `make bench`'s."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.outcome import Benchmark
from benchmarks.overlap import compare, draw
from rollart.dashboard.summary import Summary
from rollart.dashboard.timeline import Interval, measure


def known_run(alpha: int, steps: int, seed: int, folder: Path) -> Summary:
    """Taking turns a step is 3 s of rollout and 1 s of training; side by side it is 3 s, and rollout is a third slower while training."""
    intervals, samples, now, tokens = [], [(0.0, 0.0)], 0.0, 0.0
    for _ in range(steps):
        if alpha == 0:
            intervals += [Interval("rollout", now, now + 3), Interval("train", now + 3, now + 4)]
            samples += [(now + 3, tokens + 300), (now + 4, tokens + 300)]
            now, tokens = now + 4, tokens + 300
        else:
            intervals += [Interval("rollout", now, now + 3), Interval("train", now + 2, now + 3)]
            samples += [(now + 2, tokens + 180), (now + 3, tokens + 240)]
            now, tokens = now + 3, tokens + 240
    return Summary((), steps, {}, {}, measure(intervals, samples), tokens, None)


def test_headline_of_known_runs():
    outcome = compare(2, 10, known_run)
    assert [(row["way"], row["seed"]) for row in outcome.rows] == [
        ("taking turns", 0), ("side by side", 0), ("taking turns", 1), ("side by side", 1),
    ]  # fmt: skip
    assert outcome.headline["speedup"] == pytest.approx(4 / 3)
    assert outcome.headline["overlap_share"] == pytest.approx(1.0)
    assert outcome.headline["trainer_idle_share"] == pytest.approx(2 / 3)
    assert outcome.headline["rate_ratio"] == pytest.approx(60 / 90)


def test_a_benchmark_writes_its_json_and_its_picture(tmp_path: Path):
    Benchmark("known", "a claim", lambda quick: compare(1, 3, known_run), draw).run(True, tmp_path)
    stored = json.loads((tmp_path / "known.json").read_text())
    assert set(stored) >= {"machine", "rows", "headline"}
    assert stored["machine"]["cores"] >= 1
    assert (tmp_path / "known.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "known.png").unlink()
    Benchmark("known", "a claim", lambda quick: compare(1, 3, known_run), draw).redraw(tmp_path)
    assert (tmp_path / "known.png").exists()
