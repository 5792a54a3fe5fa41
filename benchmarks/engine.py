"""The embedded engine beside transformers, in tokens a second on the same policy and requests; and what a pass costs by its new tokens a request.

Both run in this process on one torch thread. Responses have set lengths with a long tail, so that every way generates the same number of tokens;
`generate` goes on with all of them until the longest has ended, which is what a static batch is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from matplotlib.figure import Figure
from transformers import AutoConfig

from benchmarks.generating.passes import pass_rows
from benchmarks.generating.ways import OURS, ways
from benchmarks.generating.workload import workload
from benchmarks.outcome import Benchmark, Outcome, Unavailable
from benchmarks.step.models import SMOLLM2, TINY, has_smollm2, make_model

BATCHES = (1, 8, 32)
NEW = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Bed:
    """One policy in one number format. Of the responses, half have up to `middle` tokens and none more than `most`."""

    model: str
    dtype: str
    middle: int
    most: int

    @property
    def name(self) -> str:
        """As rows call it."""
        return f"{self.model} {'bf16' if self.dtype == 'bfloat16' else 'fp32'}"


BEDS = (Bed(SMOLLM2, "bfloat16", 16, 96), Bed(SMOLLM2, "float32", 16, 96), Bed(TINY, "float32", 48, 160))


def rate_rows(bed: Bed, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row a batch, way and round, the ways in turns; what comes before the first round warms up."""
    rows: list[dict[str, Any]] = []
    arms = ways(folder, bed.dtype)
    vocabulary = int(AutoConfig.from_pretrained(folder, local_files_only=True).vocab_size)
    for generate in arms.values():
        generate(workload(2, vocabulary, 4, 8, seed=0))
    for batch in BATCHES:
        for number in range(rounds):
            work = workload(batch, vocabulary, bed.middle, bed.most, seed=1 + number)
            for way, generate in list(arms.items())[:: 1 if number % 2 else -1]:
                rows.append({
                    "way": f"{bed.name}, {batch}: {way}", "policy": bed.name, "arm": way, "batch": batch, "round": number,
                    "tokens_a_second": work.tokens / generate(work), "tokens": work.tokens, "load": psutil.getloadavg()[0],
                })  # fmt: skip
    return rows


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Ours to the better of theirs, round by round, the median, by policy and batch; `ratio_bN` is the least of any policy. And of passes, theirs
    to ours, and what k tokens cost beside one."""
    found: dict[str, float] = {}
    rates = [row for row in rows if "arm" in row]
    for batch in BATCHES:
        of = {policy: _ratio([r for r in rates if (r["policy"], r["batch"]) == (policy, batch)]) for policy in {row["policy"] for row in rates}}
        found[f"ratio_b{batch}"] = min(of.values())
        found |= {f"ratio_b{batch}_{_key(policy)}": value for policy, value in sorted(of.items())}
    passes = [row for row in rows if "k" in row]
    one = {(row["policy"], row["batch"]): row["ours_ms"] for row in passes if row["k"] == 1}
    for row in passes:
        at = f"b{row['batch']}_k{row['k']}_{_key(row['policy'])}"
        found[f"pass_ratio_{at}"] = row["theirs_ms"] / row["ours_ms"]
        if row["k"] > 1:
            found[f"pass_cost_{at}"] = row["ours_ms"] / one[row["policy"], row["batch"]]
    return found


def _key(policy: str) -> str:
    return policy.replace("SmolLM2-135M", "smollm2").replace(" ", "_")


def _ratio(rows: Sequence[Mapping[str, Any]]) -> float:
    ratios = []
    for number in {row["round"] for row in rows}:
        rates = {row["arm"]: row["tokens_a_second"] for row in rows if row["round"] == number}
        ratios.append(rates[OURS] / max(rate for arm, rate in rates.items() if arm != OURS))
    return median(ratios)


def measure(quick: bool) -> Outcome:
    """All policies; quick: SmolLM2 in bfloat16 alone, one round. Unavailable without SmolLM2."""
    if not has_smollm2():
        raise Unavailable("needs the packages of `make smollm2`")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="rollart-engine-") as root:
            for bed in BEDS[: 1 if quick else None]:
                folder = make_model(bed.model, Path(root))
                rows += rate_rows(bed, folder, 1 if quick else 3)
                if bed.model == SMOLLM2:
                    rows += pass_rows(bed.name, folder, bed.dtype, BATCHES, NEW, 3 if quick else 7)
    finally:
        torch.set_num_threads(threads)
    return Outcome(rows, headline(rows))


def draw(outcome: Outcome) -> Figure:
    """Tokens a second by batch and way, a panel a policy; a dot a round, a bar at the median."""
    rows = [row for row in outcome.rows if "arm" in row]
    policies, arms = (list(dict.fromkeys(row[name] for row in rows)) for name in ("policy", "arm"))
    arms.sort()
    figure = Figure(figsize=(3.8 * len(policies), 3.4), layout="constrained")
    for axes, policy in zip(figure.subplots(1, len(policies), squeeze=False)[0], policies, strict=True):
        for shift, arm in enumerate(arms):
            rates = [[r["tokens_a_second"] for r in rows if (r["policy"], r["arm"], r["batch"]) == (policy, arm, batch)] for batch in BATCHES]
            at = [place + 0.27 * (shift - 1) for place in range(len(BATCHES))]
            axes.bar(at, [median(values) for values in rates], 0.25, label=arm)
            for place, values in zip(at, rates, strict=True):
                axes.plot([place] * len(values), values, "o", color="#1a2f52", markersize=2)
        axes.set_xticks(range(len(BATCHES)), [f"{batch} requests" for batch in BATCHES], fontsize=8)
        axes.set_title(policy, fontsize=9, loc="left")
        axes.set_ylabel("tokens/s", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=7)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))  # type: ignore[union-attr, call-arg]
    return figure


BENCHMARK = Benchmark("engine", "the embedded engine beside transformers, tokens a second", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
