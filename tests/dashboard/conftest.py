"""A made-up run whose figures are known: metrics lines and trajectory rows of the shape that a real one leaves."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

TASKS = ("chain_sum", "frozenlake", "guess_number")
COLUMNS = (
    "purpose", "task", "episode", "member", "attempt", "version", "score", "first_version", "last_version", "tokens", "sampled", "turns",
    "outcome", "fate", "staleness", "seconds_total",
)  # fmt: skip


def row(purpose: str, task: str, episode: int, version: int, score: float | None, **changes: Any) -> dict[str, Any]:
    """One row of the score table."""
    values = {
        "purpose": purpose, "task": task, "episode": episode, "member": 0, "attempt": 0, "version": version, "score": score,
        "first_version": version, "last_version": version, "tokens": 120, "sampled": 40, "turns": 3, "outcome": "terminated",
        "fate": "evaluated" if purpose == "evaluate" else "trained", "staleness": 0, "seconds_total": 1.5,
    }  # fmt: skip
    return {name: (values | changes)[name] for name in COLUMNS}


def rows(steps: int = 60, episodes: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Evaluations every 20 steps that rise, and training rows of every fate."""
    draw = random.Random(seed)
    found = []
    for version in range(0, steps + 1, 20):
        for place, task in enumerate(TASKS):
            chance = 0.1 + (0.75 - 0.15 * place) * (1 - math.exp(-3 * version / steps))
            found += [row("evaluate", task, e, version, float(draw.random() < chance)) for e in range(episodes)]
    for step in range(steps):
        for i in range(24):
            fate = draw.choices(["trained", "no_signal", "too_stale", "failed"], [80, 14, 4, 2])[0]
            age = draw.choices([0, 1], [70, 30])[0]
            score = None if fate == "failed" else float(draw.random() < 0.5)
            found.append(row("train", TASKS[i % 3], step * 8 + i // 3, step, score, fate=fate, staleness=age))
    return found


def lines(steps: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Metrics in which rollout never pauses but for evaluations, and training takes 2 of each 4 seconds."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = [{"kind": "start", "step": 0, "time": 0.0}]
    now, tokens = 20.0, 0.0
    intervals: list[list[Any]] = [["warm_up", 2.0, 12.0], ["evaluate", 12.0, 20.0]]
    samples = [[now, tokens]]
    for step in range(1, steps + 1):
        for name, start, end in (("rollout", now, now + 4), ("train", now + 1.6, now + 3.6), ("publish", now + 3.6, now + 3.8)):
            intervals.append([name, start, end])
        for part in (1.6, 2.0, 0.4):
            now, tokens = now + part, tokens + part * (700 if part == 2.0 else 1000) * draw.uniform(0.9, 1.1)
            samples.append([now, round(tokens)])
        reward = {task: min(0.1 + 0.8 * step / steps + draw.gauss(0, 0.12), 1.0) for task in TASKS}
        found.append(
            {
                "kind": "step", "step": step, "version": f"0-{step}", "time": now, "seconds": {"wait": 1.6, "train": 2.0, "publish": 0.2},
                "reward": reward, "staleness": {"0": 17, "1": 7}, "in_flight": 24,
            }
        )  # fmt: skip
        if step % 20 == 0:
            intervals.append(["evaluate", now, now + 6])
            now += 6
            samples.append([now, round(tokens)])
    found.append({"kind": "intervals", "intervals": intervals})
    found.append({"kind": "tokens", "samples": samples})
    found.append({"kind": "end", "step": steps, "time": now, "peak_memory": 2_345_000_000})
    return found


@pytest.fixture
def made_up() -> SimpleNamespace:
    """What makes up a run: `row`, `rows`, `lines`, and the names in it."""
    return SimpleNamespace(row=row, rows=rows, lines=lines, TASKS=TASKS, COLUMNS=COLUMNS)
