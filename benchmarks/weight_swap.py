"""How long no token comes when an engine's weights change, and how many tokens that costs, on SmolLM2 under load.

Two ways with one engine: it halts, the version is pulled from an object store (SeaweedFS) and loaded, and it goes on; or the version is pulled
while it decodes, and then swapped in, as a generation worker does. With the KV of responses in flight computed anew or kept; on the embedded
engine, and where `make sglang` has made its environment on an SGLang server too.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import aiohttp
import psutil
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from benchmarks.outcome import Benchmark, Outcome, Unavailable
from benchmarks.reward.task import smollm2
from benchmarks.servers import ServerMissing, seaweedfs
from benchmarks.step.models import has_smollm2
from rollart.engines.client import EngineClient
from rollart.engines.process import EngineProcess
from rollart.engines.settings import EngineLaunch, EngineSettings
from rollart.engines.sglang.settings import SglangSettings
from rollart.engines.weight_cache import WeightCache
from rollart.types import GenerateRequest, GenerateResult, KVMode
from storage.version import Version
from storage.weights import WeightStore

STREAMS, LONGEST, TOKENS = 8, 320, 256
"""Responses in flight, and how long sequences and responses may get."""

BEFORE_S, AFTER_S = 4.0, 2.0
"""What is counted before and after a swap: a rate takes some steps to show."""

WAYS = ("pause and load", "prefetch and swap")
REPEATS = 4
SGLANG = Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"
_SAME_STEP_S = 0.01
"""Tokens that come within it are of one step; a step of this model takes ten times as long."""


@dataclass
class Load:
    """`STREAMS` responses that are always in flight, and when their tokens came, each with how many."""

    client: EngineClient
    url: str
    came: list[tuple[float, int]] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep_up(self) -> None:
        numbers = count()
        async with asyncio.TaskGroup() as group:
            for stream in range(STREAMS):
                group.create_task(self._stream(stream, numbers))

    async def _stream(self, stream: int, numbers: Any) -> None:
        generator = torch.Generator().manual_seed(stream)
        while True:
            prompt = tuple(torch.randint(1000, 40_000, (32,), generator=generator).tolist())
            known = 0

            def heard(so_far: GenerateResult) -> None:
                nonlocal known
                self.came.append((time.perf_counter(), len(so_far.ids) - known))
                known = len(so_far.ids)
                self.heard.set()

            number = next(numbers)
            await self.client.generate(self.url, GenerateRequest(f"r{number}", prompt, TOKENS, seed=number), heard)

    def tokens(self, start: float, end: float) -> int:
        return sum(n for at, n in self.came if start <= at < end)

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between one step and the next, of those that end within."""
        steps = [at for at, _ in self.came if start <= at < end]
        return [later - earlier for earlier, later in pairwise(steps) if later - earlier > _SAME_STEP_S]


async def post(url: str, path: str, body: Mapping[str, Any]) -> None:
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.post(url + path, json=body):
        pass


async def swap(way: str, load: Load, cache: WeightCache, version: Version, launch: EngineLaunch) -> dict[str, float]:
    """One version pulled and served under load: `stall_s` (the longest time without a token, less a usual step), `tokens_lost` against the rate
    before, `change_s` (from the pull's begin to the served version), and `hidden_share`: tokens that came while the version was pulled, over those
    that the rate before would have given."""
    await asyncio.sleep(BEFORE_S)
    begun = time.perf_counter()
    if way == WAYS[0]:
        await post(load.url, "/pause_generation", {"mode": "retract" if launch.swap == "retracting" else "in_place"})
    folder = await asyncio.to_thread(cache.fetch, version)
    pulled = time.perf_counter()
    await load.client.update_weights(load.url, str(folder), str(version), launch.swap)
    if way == WAYS[0]:
        await post(load.url, "/continue_generation", {})
    ended = time.perf_counter()
    while load.tokens(ended, time.perf_counter()) < 2 * STREAMS:  # until all go on, with their KV computed anew or not
        load.heard.clear()
        await load.heard.wait()
    await asyncio.sleep(AFTER_S)
    before = (begun - BEFORE_S, begun)
    until = time.perf_counter()
    rate = load.tokens(*before) / BEFORE_S
    lost = rate * (until - begun) - load.tokens(begun, until)
    usual = median(load.gaps(*before))
    return {
        "stall_s": max(load.gaps(begun - usual, until)) - usual, "tokens_lost": lost, "pull_s": pulled - begun,
        "change_s": ended - begun, "hidden_share": load.tokens(begun, pulled) / (rate * (pulled - begun)), "step_s": usual,
        "tokens_a_second": rate, "load_1min": round(psutil.getloadavg()[0], 2),
    }  # fmt: skip


@contextlib.asynccontextmanager
async def under_load(launch: EngineLaunch, cache: WeightCache) -> AsyncIterator[Load]:
    """An engine that serves version 0-1 and is kept busy."""
    command = launch.command(Path(launch.model_url), "127.0.0.1")
    engine = await EngineProcess.start(command, launch.environment, launch.start_seconds)
    try:
        async with EngineClient() as client:
            folder = await asyncio.to_thread(cache.fetch, Version(0, 1))
            await client.update_weights(engine.url, str(folder), "0-1", launch.swap)
            load = Load(client, engine.url)
            busy = asyncio.create_task(load.keep_up())
            try:
                yield load
            finally:
                busy.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await busy
    finally:
        await engine.end()


def launches(model: Path, quick: bool) -> list[tuple[str, KVMode, EngineLaunch]]:
    """The engines, each with the KV anew and kept."""
    found: list[tuple[str, KVMode, EngineLaunch]] = []
    for kv in cast(Sequence[KVMode], ("recomputed", "kept")):
        shape: dict[str, Any] = {"slots": STREAMS, "max_length": LONGEST, "dtype": "bfloat16", "kv": kv, "stream_interval": 1}
        found.append(("embedded", kv, EngineSettings(str(model), **shape)))
        if SGLANG.exists() and not quick:
            found.append(("sglang", kv, SglangSettings(str(model), python=str(SGLANG), **shape)))
    return sorted(found, key=lambda each: each[0])


async def rows(model: Path, store: WeightStore, parent: Path, quick: bool) -> list[dict[str, Any]]:
    found = []
    for kind, kv, launch in launches(model, quick):
        cache = WeightCache(store, parent)
        try:
            async with under_load(launch, cache) as load:
                versions = count(1)  # two take turns: what is fetched drops the one before, so that each is pulled again
                for repeat in range(1 if quick else REPEATS):
                    for way in WAYS if repeat % 2 else WAYS[::-1]:
                        told = await swap(way, load, cache, Version(0, 1 + next(versions) % 2), launch)
                        found.append({"case": f"{way}, {kind}, KV {kv}", "way": way, "engine": kind, "kv": kv, **told})
        finally:
            cache.close()
    return found


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians, by engine and KV: `stall_ratio` of pause-and-load over prefetch-and-swap, both stalls, tokens lost, and prefetch-and-swap's
    `hidden_share` of the pull."""
    found: dict[str, float] = {}
    for engine, kv in dict.fromkeys((r["engine"], r["kv"]) for r in rows):
        mine = [r for r in rows if (r["engine"], r["kv"]) == (engine, kv)]
        of = {(way, figure): median(r[figure] for r in mine if r["way"] == way) for way in WAYS for figure in ("stall_s", "tokens_lost")}
        end = f"_{engine}_{kv}"
        found["stall_ratio" + end] = of[WAYS[0], "stall_s"] / of[WAYS[1], "stall_s"]
        found["stall_s_paused" + end], found["stall_s_swapped" + end] = (of[w, "stall_s"] for w in WAYS)
        found["tokens_lost_paused" + end], found["tokens_lost_swapped" + end] = (of[w, "tokens_lost"] for w in WAYS)
        found["hidden_share" + end] = median(r["hidden_share"] for r in mine if r["way"] == WAYS[1])
    return found


def measure(quick: bool) -> Outcome:
    """Four swaps of each way in turns; quick: one of each, on the embedded engine alone. Needs SmolLM2 and SeaweedFS."""
    if not has_smollm2():
        raise Unavailable("SmolLM2-135M is not installed here: `make smollm2` does that")
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        model = smollm2(Path(temporary) / "model")
        try:
            options = stack.enter_context(seaweedfs())
        except ServerMissing as missing:
            raise Unavailable(str(missing)) from missing
        store = WeightStore("s3://bucket/weights", options)
        state = load_file(model / "model.safetensors")
        for step in (1, 2):
            store.publish(state, version=Version(0, step)).result()
        (model / "model.safetensors").unlink()  # an engine's weights come from the store
        found = asyncio.run(rows(model, store, Path(temporary), quick))
    return Outcome(found, headline(found))


def draw(outcome: Outcome) -> Figure:
    """Seconds without a token, by engine and KV."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    cases = list(dict.fromkeys((r["engine"], r["kv"]) for r in outcome.rows))
    for shift, way, colour in zip((-0.2, 0.2), WAYS, ("#a0aec0", "#2b6cb0"), strict=True):
        values = [[r["stall_s"] for r in outcome.rows if (r["engine"], r["kv"], r["way"]) == (*case, way)] for case in cases]
        places = [i + shift for i in range(len(cases))]
        axes.bar(places, [median(v) for v in values], 0.36, color=colour, label=way)
        for place, each in zip(places, values, strict=True):
            axes.plot([place] * len(each), each, "k.", markersize=3)
    axes.set(xticks=range(len(cases)), xticklabels=[f"{engine}\nKV {kv}" for engine, kv in cases], ylabel="seconds without a token")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.94))
    return figure


BENCHMARK = Benchmark("weight_swap", "How long no token comes when weights change under load, by when the version is pulled", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
