"""What versioned weights cost beside plain files: speed, memory, and the bytes that deltas, slices and many pullers move."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.buckets import bucket
from benchmarks.outcome import Benchmark, Outcome
from benchmarks.weight_delta import delta_figures
from benchmarks.weight_memory import DOINGS, peak_ratio
from benchmarks.weight_pullers import puller_figures
from benchmarks.weight_slices import slice_figures
from benchmarks.weight_states import STATES, make, nbytes, touched
from benchmarks.weight_ways import BUCKET_WAYS, LOCAL_WAYS, Opener

LATENCY_S = 0.025
"""What a bucket in the same region takes to answer, about."""

Row = dict[str, Any]


def rounds(where: str, ways: Mapping[str, Opener], size: str, url: str, options: dict[str, Any], count: int) -> list[Row]:
    """One row a way and round: MB/s of a publish, and of a pull into tensors whose memory is there. The ways take turns."""
    state = make(size)
    out = touched(state)
    rows = []
    for number in range(count):
        for way, kind in list(ways.items())[:: 1 if number % 2 else -1]:
            store = kind(f"{url}/{way}-{uuid.uuid4().hex[:8]}", options)
            os.sync()  # or the disk would still be busy with what the way before has left or removed
            begun = time.perf_counter()
            store.publish(state)
            published = time.perf_counter()
            store.pull(out)
            pulled = time.perf_counter()
            _check_equal(state, out, way)
            store.clear()
            megabytes = nbytes(state) / 1e6
            rows.append(
                {
                    "way": f"{where}, {size}: {way}",
                    "round": number,
                    "publish_mb_s": megabytes / (published - begun),
                    "pull_mb_s": megabytes / (pulled - published),
                }
            )
    return rows


def _check_equal(state: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor], way: str) -> None:
    for name, tensor in state.items():
        if not torch.equal(tensor, out[name]):
            raise ValueError(f"{way} gave tensor {name!r} back changed")
        out[name].fill_(1)


def ratios(rows: Sequence[Row], where: str, size: str) -> dict[str, float]:
    """Of versions to one safetensors file or object, round by round; the medians."""
    figures = ("publish_mb_s", "pull_mb_s")
    ours, theirs = ([row for row in rows if row["way"] == f"{where}, {size}: {way}"] for way in ("versions", "safetensors"))
    return {figure: median(o[figure] / t[figure] for o, t in zip(ours, theirs, strict=True)) for figure in figures}


def memory_figures(url: str, bucket_url: str, options: dict[str, Any], size: str) -> dict[str, float]:
    """Peak memory beyond the caller's tensors over the state's size, by what is done and where."""
    found = {}
    for where, base, opened in (("disk", url, {}), ("bucket", bucket_url, options)):
        for doing in DOINGS:
            target = f"{base}/memory-{doing}" if doing != "pull" else f"{base}/memory-publish"
            found[f"{doing} {where}"] = peak_ratio(doing, size, target, opened)
    return found


def measure(quick: bool) -> Outcome:
    """Disk, then a bucket on this machine, without and with latency; quick: the smaller state only, fewer rounds."""
    sizes = list(STATES)[: 1 if quick else None]
    count = 3 if quick else 7
    folder = Path(tempfile.mkdtemp(prefix="rollart-weights-"))
    rows: list[Row] = []
    headline: dict[str, float] = {}
    try:
        for size in sizes:
            rows += rounds("disk", LOCAL_WAYS, size, str(folder), {}, count)
        disk = [ratios(rows, "disk", size) for size in sizes]
        headline["publish_ratio"] = min(r["publish_mb_s"] for r in disk)
        headline["pull_ratio"] = min(r["pull_mb_s"] for r in disk)
        small = sizes[0]
        with bucket() as (url, options):
            memory = memory_figures(str(folder), url, options, small)
            rows += rounds("bucket", BUCKET_WAYS, small, url, options, 2 if quick else 3)
        with bucket(LATENCY_S) as (url, options):
            rows += rounds("bucket at 25 ms", BUCKET_WAYS, small, url, options, 1 if quick else 3)
        for where, label in (("bucket", "bucket"), ("bucket at 25 ms", "far_bucket")):
            found = ratios(rows, where, small)
            headline[f"publish_ratio_{label}"] = found["publish_mb_s"]
            headline[f"pull_ratio_{label}"] = found["pull_mb_s"]
        headline["memory_ratio"] = max(value for name, value in memory.items() if not name.startswith("publish_background"))
        headline["memory_ratio_background_publish"] = max(value for name, value in memory.items() if name.startswith("publish_background"))
        headline |= slice_figures(str(folder / "slices"), small)
        headline |= delta_figures(quick)
        headline |= puller_figures(quick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(rows, headline)


def draw(outcome: Outcome) -> Figure:
    """Publish and pull speed by way, one panel a place."""
    speeds: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in outcome.rows:
        place, _, way = str(row["way"]).partition(": ")
        speeds[place][way].append((row["publish_mb_s"], row["pull_mb_s"]))
    figure = Figure(figsize=(3.2 * len(speeds), 3.4), layout="constrained")
    for axes, (place, ways) in zip(figure.subplots(1, len(speeds), squeeze=False)[0], speeds.items(), strict=True):
        at = np.arange(len(ways))
        for shift, (index, label) in zip((-0.2, 0.2), enumerate(("publish", "pull")), strict=True):
            axes.bar(at + shift, [median(pair[index] for pair in pairs) for pairs in ways.values()], 0.38, label=label)
        axes.set_xticks(at, list(ways), rotation=30, fontsize=7)
        axes.set_title(place, fontsize=8)
        axes.set_ylabel("MB/s", fontsize=8)
    figure.axes[0].legend(fontsize=7)
    return figure


BENCHMARK = Benchmark("weights", "versions beside one safetensors file: publish and pull, MB/s", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
