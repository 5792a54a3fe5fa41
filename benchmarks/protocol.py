"""What the engines' HTTP protocol costs: this project's client and the embedded engine's server, over an engine that computes nothing.

The floor is aiohttp alone with bytes of the same length, which neither side reads or makes: requests a second, and processor time of both
sides together, in turns. Prompts of 512 tokens, answers of 64; streamed ones of 2,048.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import aiohttp
import psutil
from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from rollart.engines.client import EVENT_BYTES, EngineClient
from rollart.types import GenerateRequest

PROMPT, ANSWER, STREAMED = 512, 64, 2048
CASES = ((1, 500), (64, 3000), (1000, 6000))
"""Requests in flight, and how many there are in all."""

STREAMS = (64, 192)
REPEATS = 5
WAYS = ("engine", "floor")

Ask = Callable[[int, bool], Awaitable[int]]
"""Sends request number n, streamed or not, and returns how many tokens or pieces it was answered with."""


@contextmanager
def server(way: str) -> Iterator[str]:
    """A process of `benchmarks.protocol_server`; its URL."""
    command = [sys.executable, "-m", "benchmarks.protocol_server", way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"])
        process.stdin.close()


def asking_engine(client: EngineClient, url: str) -> Ask:
    """Requests as a rollout worker sends them."""
    prompt = tuple(range(PROMPT))

    async def ask(number: int, stream: bool) -> int:
        request = GenerateRequest(f"r{number:015d}", prompt, STREAMED if stream else ANSWER, seed=number, extra_key="0-1")
        result = await client.generate(url, request, (lambda _: None) if stream else None)
        return len(result.ids)

    return ask


def asking_floor(session: aiohttp.ClientSession, url: str) -> Ask:
    """The same bytes, ready-made, and their answer, unread."""
    bodies = {s: json.dumps(GenerateRequest("r" * 16, tuple(range(PROMPT)), 64, seed=1, extra_key="0-1").to_wire(s)).encode() for s in (False, True)}

    async def ask(number: int, stream: bool) -> int:
        tokens = STREAMED if stream else ANSWER
        async with session.post(f"{url}/generate?tokens={tokens}{'&stream' if stream else ''}", data=bodies[stream]) as response:
            if not stream:
                await response.read()
                return tokens
            async for _ in response.content:
                pass
            return tokens

    return ask


async def crowd(ask: Ask, in_flight: int, count: int, stream: bool) -> None:
    """`count` requests, `in_flight` at a time; RuntimeError if one is not answered whole."""
    numbers = iter(range(count))
    wanted = STREAMED if stream else ANSWER

    async def one() -> None:
        for number in numbers:
            if (told := await ask(number, stream)) != wanted:
                raise RuntimeError(f"an answer has {told} tokens of {wanted}")

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(one())


async def cpu_of(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(url + "/cpu") as response:
        return float((await response.json())["seconds"])


async def measured(session: aiohttp.ClientSession, url: str, ask: Ask, in_flight: int, count: int, stream: bool) -> dict[str, Any]:
    """Rate and processor time a request of both sides."""
    server_before, client_before, begun = await cpu_of(session, url), time.process_time(), time.perf_counter()
    await crowd(ask, in_flight, count, stream)
    wall, client = time.perf_counter() - begun, time.process_time() - client_before
    answering = await cpu_of(session, url) - server_before
    unit = count * (STREAMED / 1000 if stream else 1)
    return {
        "requests_a_second": count / wall, "client_cpu_ms": client / unit * 1e3, "server_cpu_ms": answering / unit * 1e3,
        "cpu_ms": (client + answering) / unit * 1e3, "load_1min": round(psutil.getloadavg()[0], 2),
    }  # fmt: skip


async def rows(quick: bool) -> list[dict[str, Any]]:
    cases = [(n, count // 10 if quick else count, False) for n, count in CASES] + [(STREAMS[0], STREAMS[1] // 3 if quick else STREAMS[1], True)]
    found = []
    connector = aiohttp.TCPConnector(limit=0)
    with server("engine") as engine, server("floor") as floor:
        async with EngineClient() as client, aiohttp.ClientSession(connector=connector, read_bufsize=EVENT_BYTES) as session:
            sides = {"engine": (engine, asking_engine(client, engine)), "floor": (floor, asking_floor(session, floor))}
            for _, ask in sides.values():
                await crowd(ask, 64, 256, False)  # what starts up once: imports, connections
            for repeat in range(2 if quick else REPEATS):
                for in_flight, count, stream in cases:
                    for way in WAYS if repeat % 2 else WAYS[::-1]:
                        url, ask = sides[way]
                        name = f"{way}, {in_flight:,} {'streams' if stream else 'in flight'}"
                        about = {"case": name, "way": way, "in_flight": in_flight, "streamed": stream}
                        found.append({**about, **await measured(session, url, ask, in_flight, max(count, in_flight), stream)})
    return found


def headline(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians: `cpu_ms_N` of both sides a request with N in flight, `cpu_over_floor_N`, `requests_a_second_N`; and of a thousand streamed tokens."""

    def of(figure: str, way: str, in_flight: int, stream: bool) -> float:
        return median(r[figure] for r in rows if (r["way"], r["in_flight"], r["streamed"]) == (way, in_flight, stream))

    found: dict[str, float] = {}
    for in_flight, _ in CASES:
        each = {way: of("cpu_ms", way, in_flight, False) for way in WAYS}
        found[f"cpu_ms_{in_flight}"] = each["engine"]
        found[f"cpu_over_floor_{in_flight}"] = each["engine"] / each["floor"]
        found[f"requests_a_second_{in_flight}"] = of("requests_a_second", "engine", in_flight, False)
    found["stream_cpu_ms_per_1000_tokens"] = of("cpu_ms", "engine", STREAMS[0], True)
    found["stream_cpu_over_floor"] = found["stream_cpu_ms_per_1000_tokens"] / of("cpu_ms", "floor", STREAMS[0], True)
    return found


def measure(quick: bool) -> Outcome:
    """Five turns of each case; quick: two, of a tenth of the requests."""
    found = asyncio.run(rows(quick))
    return Outcome(found, headline(found))


def draw(outcome: Outcome) -> Figure:
    """Processor time of both sides, by requests in flight and for streamed tokens."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    labels = [f"{n:,} in flight" for n, _ in CASES] + ["1,000 tokens streamed"]
    keys = [(n, False) for n, _ in CASES] + [(STREAMS[0], True)]
    for shift, way, colours in ((-0.2, "engine", ("#2b6cb0", "#90cdf4")), (0.2, "floor", ("#718096", "#cbd5e0"))):
        below = [0.0] * len(keys)
        for side, colour in zip(("client_cpu_ms", "server_cpu_ms"), colours, strict=True):
            values = [median(r[side] for r in outcome.rows if (r["way"], r["in_flight"], r["streamed"]) == (way, *key)) for key in keys]
            label = f"{way}, {side.split('_')[0]}"
            axes.bar([i + shift for i in range(len(keys))], values, 0.36, bottom=below, color=colour, label=label)
            below = [a + b for a, b in zip(below, values, strict=True)]
    axes.set(xticks=range(len(keys)), xticklabels=labels, ylabel="processor time, ms")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.94))
    return figure


BENCHMARK = Benchmark("protocol", "What a request to an engine costs both sides, beside aiohttp alone with the same bytes", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
