"""Writes the traces: `python benchmarks/traces/make.py NAME ...` (default: all). Deterministic, by the seeds below; times in seconds."""

import json
import sys
from pathlib import Path

import numpy as np


def latency_spread(std):
    """Batch of 128 trajectories, 10 turns each; per-turn environment latency normal(10, std), clipped at 0; generation 2 s a turn."""
    rng = np.random.default_rng(1000 + std)
    return {"mean": 10, "std": std, "generation_s": 2.0, "turn_latency_s": np.clip(rng.normal(10, std, (128, 10)), 0, None).round(3).tolist()}


def long_tail():
    """40 batches of 64 on 64 slots: lognormal response seconds (median 20, sigma 0.9), 1 to 30 turns, resets with a tail, 55 s a step."""
    rng = np.random.default_rng(7)
    n = 40 * 64
    turns = np.clip(rng.geometric(0.2, n), 1, 30)
    return {
        "batch": 64,
        "slots": 64,
        "train_s": 55.0,
        "trajectories": [
            {"reset_s": round(float(r), 3), "turn_s": [round(float(x), 3) for x in rng.lognormal(np.log(20 / t), 0.9, t)]}
            for t, r in zip(turns, rng.lognormal(0, 1.2, n), strict=True)
        ],
    }


def mixed_tasks():
    """Two tasks, 1 and 20 times slow, equal weights, group 8: for shares and for the distribution of trained lengths."""
    rng = np.random.default_rng(11)
    return {
        "group": 8,
        "tasks": {
            name: {"scale": s, "duration_s": (s * rng.lognormal(0, 0.6, 1600)).round(3).tolist()} for name, s in (("quick", 1.0), ("slow", 20.0))
        },
    }


def resets_and_failures():
    """Group 8, 32 groups a batch: resets lognormal with 2 % of hundreds of seconds, 3 % of attempts fail at start, times don't depend on content."""
    rng = np.random.default_rng(13)
    n = 20 * 32 * 8
    reset = np.where(rng.random(n) < 0.02, rng.uniform(100, 400, n), rng.lognormal(0.5, 0.5, n))
    return {
        "group": 8,
        "groups": 32,
        "reset_s": reset.round(3).tolist(),
        "fails_at_start": (rng.random(n) < 0.03).tolist(),
        "run_s": rng.uniform(20, 40, n).round(3).tolist(),
    }


def length_drives_latency():
    """Group 8: response length lognormal, time = 0.05 s a token; reward falls with length, so a rule that keeps the quick shifts both."""
    rng = np.random.default_rng(17)
    length = np.clip(rng.lognormal(6, 0.8, 20 * 32 * 8), 16, 8192).astype(int)
    return {
        "group": 8,
        "groups": 32,
        "tokens": length.tolist(),
        "seconds_per_token": 0.05,
        "reward": (rng.random(length.size) < 1 / (1 + (length / 600) ** 2)).astype(int).tolist(),
    }


def reward_bursts():
    """30 minutes of reward calls: bursts at the end of each rollout wave, judge time lognormal (median 1.5 s)."""
    rng = np.random.default_rng(19)
    t = np.sort(np.concatenate([w * 120 + rng.gamma(2, 8, 128) for w in range(15)]))
    return {"arrival_s": t.round(3).tolist(), "service_s": rng.lognormal(np.log(1.5), 0.7, t.size).round(3).tolist(), "dedicated_workers": 16}


if __name__ == "__main__":
    traces = {f"latency_spread_s{s}": latency_spread(s) for s in (1, 3, 5, 7, 10)}
    traces |= {f.__name__: f() for f in (long_tail, mixed_tasks, resets_and_failures, length_drives_latency, reward_bursts)}
    for name in sys.argv[1:] or traces:
        (Path(__file__).parent / f"{name}.json").write_text(json.dumps(traces[name]))
