"""What drafts are worth on SmolLM2: tokens a second by draft, its length and the batch beside the same engine without, and whole runs so.

Sampled at temperature 1 from questions that no draft has seen, whose tasks drafts know: what was sampled for earlier questions is the n-grams'
memory and what the head learned from. `asked again` is the memory's other half: the same questions a second time, as later epochs ask them.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.outcome import Benchmark, Outcome
from benchmarks.reward.task import smollm2
from benchmarks.speculating import end_to_end
from benchmarks.speculating.heads import head_of
from benchmarks.speculating.play import Played, play
from benchmarks.speculating.questions import Question, questions
from rollart.control.speculation import DraftLengths
from rollart.drafts.folder import load_head, save_head
from rollart.drafts.head import DraftHead
from rollart.engines.embedded.model import PolicyModel
from rollart.engines.embedded.scheduler import Scheduler
from rollart.engines.speculative.head_draft import HeadDraft
from rollart.engines.speculative.ngram_draft import NgramDraft
from rollart.engines.speculative.speculator import Speculator
from rollart.types import SamplingTransform

TRANSFORM = SamplingTransform(1.0)
CHUNK = 1024
PLAIN, FP32 = "plain", "plain, fp32"
ADAPTIVE, AGAIN = "ngram, adaptive", "ngram, adaptive, asked again"
BATCHES = {1: (3, 1), 8: (2, 8), 32: (5, 8)}
"""Requests at a time: questions a round, and members of each question's group."""
QUICK = {1: (2, 1), 8: (1, 8)}
SEEN = 96
"""Questions that were asked before: what drafts know of the tasks."""

KEPT, EPOCHS = 4096, 3
"""Tokens that the head can propose, and how often it sees each response of theirs."""

END_TO_END = ({"alpha": 0, "steps": 3, "groups": 3}, {"alpha": 1, "steps": 3, "groups": 3})
"""Runs with and without a draft."""


@dataclass(frozen=True, slots=True)
class Bed:
    """The model in the two number formats, how many rounds are asked, how long a response may be, and what is asked at a time."""

    folder: Path
    policies: Mapping[str, PolicyModel]
    rounds: int
    new: int
    batches: Mapping[int, tuple[int, int]]


def scheduler(policy: PolicyModel, batch: int, speculator: Speculator | None) -> Scheduler:
    """An engine for `batch` requests at a time, as a generation worker has it."""
    return Scheduler(policy, 2 * batch, end_to_end.LENGTH, CHUNK, "0", lambda _: None, speculator=speculator)


def sampled_before(policy: PolicyModel, folder: Path, count: int, new: int, draft: NgramDraft) -> Played:
    """Plays `count` questions that no arm is measured on, so that `draft` remembers them."""
    asked = questions(folder, "train", 0, count)
    speculator = Speculator(draft, 1)
    return play(scheduler(policy, 16, speculator), asked, 2, 16, new, TRANSFORM, policy.eos_token_ids, seed=1)


Maker = Callable[[int], Speculator | None]
"""What drafts for an engine of so many requests at a time, made anew."""


def arms(policy: PolicyModel, memory: NgramDraft, head: DraftHead, lengths: Sequence[int]) -> dict[str, Maker]:
    """By name, with what was known before and nothing else."""
    longest = max(lengths)

    def ngram(length: int, adaptive: bool = False) -> Maker:
        return lambda batch: Speculator(copy.deepcopy(memory), length, DraftLengths(length) if adaptive else None)

    def headed(length: int, adaptive: bool = False) -> Maker:
        def make(batch: int) -> Speculator:
            draft = HeadDraft(policy, 2 * batch, end_to_end.LENGTH, CHUNK, head, "0-0")
            return Speculator(draft, length, DraftLengths(length) if adaptive else None)

        return make

    found: dict[str, Maker] = {PLAIN: lambda batch: None}
    found |= {f"ngram {k}": ngram(k) for k in lengths} | {f"head {k}": headed(k) for k in lengths}
    return found | {ADAPTIVE: ngram(longest, adaptive=True), "head, adaptive": headed(longest, adaptive=True)}


def row_of(way: str, batch: int, number: int, played: Played) -> dict[str, Any]:
    """One play's figures."""
    return {
        "way": f"batch {batch}: {way}", "arm": way, "batch": batch, "round": number, "tokens_a_second": played.rate, "pass_ms": played.pass_ms,
        "acceptance_length": played.acceptance_length, "drafted_a_pass": played.drafted / played.verified if played.verified else 0.0,
    }  # fmt: skip


def rates(bed: Bed, makers: Mapping[str, Maker]) -> list[dict[str, Any]]:
    """Every arm at every batch, in turns. A play that isn't measured comes before, in which an adaptive length settles."""
    rows: list[dict[str, Any]] = []
    stop = bed.policies["bfloat16"].eos_token_ids
    for batch, (count, members) in bed.batches.items():
        engines = {way: scheduler(bed.policies["bfloat16"], batch, make(batch)) for way, make in makers.items()}
        engines[FP32] = scheduler(bed.policies["float32"], batch, None)

        def ask(engine: Scheduler, asked: Sequence[Question], seed: int, batch: int = batch, members: int = members) -> Played:
            return play(engine, asked, members, batch, bed.new, TRANSFORM, stop, seed)

        for way, engine in engines.items():
            if way.endswith("adaptive"):
                ask(engine, questions(bed.folder, "train", SEEN, count), seed=2)
        for number in range(bed.rounds):
            asked = questions(bed.folder, "evaluate", number * count, count)
            for way, engine in list(engines.items())[:: 1 if number % 2 else -1]:
                rows.append(row_of(way, batch, number, ask(engine, asked, seed=3 + number)))
                if way == ADAPTIVE:
                    rows.append(row_of(AGAIN, batch, number, ask(engine, asked, seed=1000 + number)))
    return rows


def measure(quick: bool) -> Outcome:
    """SmolLM2, then two runs of it at each alpha; quick: few questions and one run of a step with each, which shows that it runs.

    Unavailable without the weights' packages.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollart-speculation-") as place:
        root = Path(place)
        folder = smollm2(root / "model")
        policies = {name: PolicyModel(folder, getattr(torch, name), torch.device("cpu")) for name in ("bfloat16", "float32")}
        memory = NgramDraft()
        new = 16 if quick else end_to_end.NEW_TOKENS
        seen = sampled_before(policies["bfloat16"], folder, 3 if quick else SEEN, new, memory)
        ends = policies["bfloat16"].eos_token_ids
        head, learnt = head_of(folder, seen.texts, KEPT, 1 if quick else EPOCHS, ends)
        save_head(head, root / "head")
        served = load_head(root / "head", torch.bfloat16)
        rows = rates(
            Bed(folder, policies, 1 if quick else 2, new, QUICK if quick else BATCHES),
            arms(policies["bfloat16"], memory, served, (2,) if quick else (1, 2, 4)),
        )
        found = headline(rows) | {f"head_chance_{place}": chance for place, chance in enumerate(learnt, 1)}
        drafts = {"plain": {}, "ngram": {"draft": "ngram", "length": 4}, "head": {"draft": "head", "model": str(root / "head"), "length": 2}}
        for scale in END_TO_END[: 1 if quick else None]:
            rows += whole_runs(drafts, {**scale, **({"steps": 1, "groups": 3} if quick else {})}, root)
    return Outcome(rows, found | end_to_end_headline(rows))


def whole_runs(drafts: Mapping[str, Mapping[str, Any]], scale: Mapping[str, int], root: Path) -> list[dict[str, Any]]:
    """One run a draft, of that scale."""
    found = []
    for name, draft in drafts.items():
        summary = end_to_end.train(draft, folder=root, name=f"{name}-alpha{scale['alpha']}", **scale)
        found.append({"way": f"run at alpha {scale['alpha']}: {name}", "draft": name, "alpha": scale["alpha"], **end_to_end.observation(summary)})
    return found


def end_to_end_headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the runs: seconds a step without a draft over those with the better draft, and what Amdahl's law allows at the measured share of rollout."""
    found: dict[str, float] = {}
    for alpha in sorted({row["alpha"] for row in rows if "alpha" in row}):
        of = {row["draft"]: row for row in rows if row.get("alpha") == alpha}
        best = min((row for name, row in of.items() if name != "plain"), key=lambda row: row["seconds_a_step"])
        name = "end_to_end_speedup" if alpha == 0 else f"end_to_end_speedup_alpha{alpha}"
        found[name] = of["plain"]["seconds_a_step"] / best["seconds_a_step"]
        if alpha == 0:
            found["rollout_share"] = of["plain"]["rollout_share"]
            found["amdahl_bound_of_twice"] = end_to_end.bound(of["plain"]["rollout_share"], 2.0)
    return found


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the plays, by batch: the best draft over the best engine without one, round by round; its tokens a pass, and what such a pass costs."""
    found: dict[str, float] = {}
    for batch in sorted({row["batch"] for row in rows if "batch" in row}):
        here = [row for row in rows if row.get("batch") == batch]
        of = {arm: [row for row in here if row["arm"] == arm] for arm in {row["arm"] for row in here}}
        plain = max((PLAIN, FP32), key=lambda arm: median(row["tokens_a_second"] for row in of[arm]))
        drafted = [arm for arm in of if arm not in (PLAIN, FP32, AGAIN)]
        speedups = {arm: _ratio(of[arm], of[plain], "tokens_a_second") for arm in [*drafted, AGAIN]}
        best = max(drafted, key=lambda arm: speedups[arm])
        found |= {
            f"generation_speedup_b{batch}": speedups[best],
            f"acceptance_length_b{batch}": median(row["acceptance_length"] for row in of[best]),
            f"cycle_cost_b{batch}": _ratio(of[best], of[plain], "pass_ms"),
            f"adaptive_speedup_b{batch}": max(speedups[arm] for arm in drafted if arm.endswith("adaptive")),
            f"asked_again_speedup_b{batch}": speedups[AGAIN],
        }
    return found


def _ratio(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], figure: str) -> float:
    return median(o[figure] / t[figure] for o, t in zip(ours, theirs, strict=True))


def draw(outcome: Outcome) -> Figure:
    """Tokens a second over the plain engine's by arm, a panel a batch; a dot a round, a bar at the median, its acceptance length beside it."""
    batches = sorted({row["batch"] for row in outcome.rows if "batch" in row})
    figure = Figure(figsize=(3.6 * len(batches), 3.8), layout="constrained")
    for axes, batch in zip(figure.subplots(1, len(batches), sharey=True, squeeze=False)[0], batches, strict=True):
        rows = [row for row in outcome.rows if row.get("batch") == batch]
        names = sorted({row["arm"] for row in rows})
        plain = {row["round"]: row["tokens_a_second"] for row in rows if row["arm"] == PLAIN}
        for place, arm in enumerate(names):
            of = [row for row in rows if row["arm"] == arm]
            ratios = [row["tokens_a_second"] / plain[row["round"]] for row in of]
            axes.barh(place, median(ratios), color="#90a8c8", height=0.6)
            axes.plot(ratios, [place] * len(ratios), "o", color="#1a2f52", markersize=3)
            axes.text(0.03, place, f"{median(row['acceptance_length'] for row in of):.2f} a pass", va="center", fontsize=7)
        axes.axvline(1.0, color="#718096", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(f"batch {batch}", fontsize=10, loc="left")
        axes.set_xlabel("tokens/s over plain")
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(rect=(0, 0.05, 1, 0.95))  # type: ignore[union-attr]
    return figure


BENCHMARK = Benchmark("speculation", "Speculative decoding beside plain decoding, and whole runs with and without it", measure, draw)

if __name__ == "__main__":
    BENCHMARK.main()
