"""The runs behind the studies of staleness: one cluster for all, one warm-up a seed, and every finished run kept and not run again.

Owns how a run is started and which of its figures are kept; what they mean is the studies' matter.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import dask
import psutil

from rollart.cluster import local_cluster, scratch_folder
from rollart.config import load
from rollart.dashboard.metrics import read_metrics
from rollart.dashboard.summary import summarize_run
from rollart.rollout.tables import score_table

CONFIG = Path(__file__).parents[1] / "flows" / "configs" / "quickstart.yaml"
KEPT = Path("runs") / "staleness"
"""Beside the other runs of whoever starts a study."""

UNWATCHED = {"distributed.worker.profile.enabled": False, "distributed.admin.system-monitor.disk": False}
"""Dask's look at its own processes, which nobody sees here; how often it takes the others is for `rollart.cluster` to say."""

ONE_PLACE = "stages.reward=player"
"""Rewards are computed where the environments are: a process less to start and to keep awake."""


@dataclass(frozen=True)
class Scale:
    """How large the runs are: `steps` training steps of `groups` groups, then `episodes` held-out episodes a task; `warm_up` supervised
    steps before.

    `slots` is room for every trajectory that alpha 2 admits at once: each begins when it is admitted, and so is as old as the window lets
    it become, on a slow machine as on a fast one. `plays`: scripted episodes of the warm-up, by task, where not the quick start's.
    """

    seeds: int = 5
    steps: int = 60
    groups: int = 12
    episodes: int = 400
    warm_up: int = 300
    slots: int = 288
    plays: str = ""

    def room(self) -> list[str]:
        """Where the runs take place, which changes nothing of what they learn."""
        return [f"hardware.player.slots={self.slots}", f"engine.slots={self.slots}", "run.dashboard_port=0", ONE_PLACE]

    def warmed(self) -> list[str]:
        """What the warm-up of a seed sets: the policy that it ends with is measured once, for all ways."""
        plays = [f"warm_up.episodes={self.plays}"] if self.plays else []
        return [f"warm_up.steps={self.warm_up}", f"evaluate.episodes={self.episodes}", *plays]

    def trained(self) -> list[str]:
        """What a training sets. The flow measures before the first step, again after every so many, and at the end. The first is the
        warm-up's here, so a step more than `steps` is taken, the measure is the one before it, and the other two are next to nothing."""
        return [
            "warm_up.steps=0", f"train.groups={self.groups}", f"train.steps={self.steps + 1}", f"train.checkpoint_every={self.steps + 1}",
            f"evaluate.every={self.steps}", f"evaluate.every_episodes={self.episodes}", "evaluate.episodes=1",
        ]  # fmt: skip


QUICK = Scale(
    seeds=1, steps=4, groups=6, episodes=8, warm_up=40, slots=144, plays="{frozen_lake: 60, guess_number: 120, chain_sum: 120}"
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One arm of a study: its name in the rows, and what it sets beside what all set."""

    name: str
    overrides: tuple[str, ...]


def rows(ways: Sequence[Way], scale: Scale, kept: Path = KEPT) -> list[dict[str, Any]]:
    """One row for each way and seed. What lies in `kept` and was taken with these settings is not run again.

    The order of the ways goes round from seed to seed, so that a machine whose load drifts burdens all.
    """
    kept = kept.resolve()
    kept.mkdir(parents=True, exist_ok=True)
    order = [(way, seed) for seed in range(scale.seeds) for way in (*ways[seed % len(ways) :], *ways[: seed % len(ways)])]
    asyncio.run(_run_missing([one for one in order if _row(*one, scale, kept) is None], scale, kept))
    found = [_row(way, seed, scale, kept) for way in ways for seed in range(scale.seeds)]
    return [row for row in found if row is not None]


def _row(way: Way, seed: int, scale: Scale, kept: Path) -> dict[str, Any] | None:
    return stored(kept / _name(way, seed), [*scale.trained(), *way.overrides])


async def _run_missing(missing: Sequence[tuple[Way, int]], scale: Scale, kept: Path) -> None:
    """Measures and keeps them, one after the other, on a cluster of their own."""
    if not missing:
        return
    config = load(CONFIG, scale.room())
    with scratch_folder() as scratch, dask.config.set(UNWATCHED):
        async with local_cluster(config, scratch) as cluster:
            for way, seed in missing:
                await _measure(way, seed, scale, kept, cluster.scheduler_address)


async def _measure(way: Way, seed: int, scale: Scale, kept: Path, scheduler: str) -> None:
    """Keeps the row of a way and seed, trained from the seed's warm-up, which is made first if it isn't there."""
    place = [f"run.seed={seed}", f"run.root={kept}", f"run.scheduler={scheduler}", *scale.room()]
    warm = kept / f"warm-up-seed{seed}"
    start = stored(warm, scale.warmed())
    if start is None:
        await _run("sft", warm, scale.warmed(), place)
        start = {"before": measured(str(warm), 0)}
        keep(warm, scale.warmed(), start)
    run, settings = kept / _name(way, seed), [*scale.trained(), *way.overrides]
    begun, load_before = time.monotonic(), psutil.getloadavg()[0]
    await _run("train", run, settings, [*place, f"policy={{model: '{warm / 'weights'}@0-0'}}"])
    row = {
        "way": way.name, "seed": seed, "before": fmean(start["before"].values()), **figures(str(run), scale.steps),
        "seconds": time.monotonic() - begun, "load": max(load_before, psutil.getloadavg()[0]), "before_by_task": start["before"],
    }  # fmt: skip
    keep(run, settings, row)
    shutil.rmtree(run)


async def _run(flow: str, run: Path, settings: Sequence[str], place: Sequence[str]) -> None:
    """Runs the command as a user would, in a process of its own. What an earlier try left is removed; RuntimeError if this one fails."""
    shutil.rmtree(run, ignore_errors=True)
    sets = [part for override in (*settings, *place, f"run.name={run.name}") for part in ("--set", override)]
    log = run.with_suffix(".log")
    with log.open("wb") as output:
        program = (sys.executable, "-m", "rollart", "run", flow, "--config", str(CONFIG), *sets)
        process = await asyncio.create_subprocess_exec(*program, stdout=output, stderr=output)
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
    if code:
        raise RuntimeError(f"{run.name} ended with exit code {code}; {log} says why, and the same command goes on from here")


def measured(url: str, version: int) -> dict[str, float]:
    """Task to mean reward on the held-out episodes that version `version` of the run at `url` was measured on."""
    tasks = summarize_run(url, None, score_table(url)).tasks
    return {task.task: found.estimate.mean for task in tasks for found in task.evaluations if found.version == version}


def figures(url: str, steps: int) -> dict[str, Any]:
    """What is kept of the first `steps` steps of the run at `url`.

    `after`: mean over the tasks of the mean reward on held-out episodes; `effective`, `clipped` and `truncated`: means over the steps of
    the effective sample share and of the shares of tokens that were clipped or whose weight was capped; `stale_tokens`: share of the
    trained tokens by staleness; `stale_trajectories`: trajectories of the batches by the staleness of their first token; `curve`: mean
    over the tasks of the reward of each step's batch.
    """
    after = measured(url, steps)
    lines = [line for line in read_metrics(url) if line["kind"] == "step" and line["step"] <= steps]
    trained = [line["train"] for line in lines]
    tokens: Counter[str] = Counter()
    trajectories: Counter[str] = Counter()
    for line in lines:
        tokens.update({age: told["tokens"] for age, told in line["train"]["by_staleness"].items()})
        trajectories.update(line["staleness"])
    return {
        "after": fmean(after.values()),
        "effective": fmean(step["effective_sample_share"] for step in trained),
        "clipped": fmean(step["shares"].get("clipped", 0.0) for step in trained),
        "truncated": fmean(step["shares"].get("truncated", 0.0) for step in trained),
        "after_by_task": after,
        "stale_tokens": {age: count / tokens.total() for age, count in sorted(tokens.items())},
        "stale_trajectories": dict(sorted(trajectories.items())),
        "fates": lines[-1]["fates"],
        "curve": [fmean(line["reward"].values()) for line in lines],
    }  # fmt: skip


def stored(run: Path, settings: Sequence[str]) -> dict[str, Any] | None:
    """What was kept of `run`, None where nothing was or it was taken with other settings."""
    file = run.with_suffix(".json")
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    kept: dict[str, Any] = found["kept"]
    return kept if found["settings"] == list(settings) else None


def keep(run: Path, settings: Sequence[str], what: dict[str, Any]) -> None:
    """Keeps `what` of `run` for the next time that a study is started."""
    run.with_suffix(".json").write_text(json.dumps({"settings": list(settings), "kept": what}, indent=1, allow_nan=False) + "\n")


def _name(way: Way, seed: int) -> str:
    return f"{way.name.replace(' ', '-')}-seed{seed}"
