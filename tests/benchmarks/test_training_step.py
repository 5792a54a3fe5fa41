"""The training step benchmark's arithmetic on costs that are known, and its batches; the steps themselves are `make bench`'s."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.outcome import Outcome
from benchmarks.step.batches import Shape, draw_batch
from benchmarks.step.comparisons import agree
from benchmarks.training_step import draw, headline


def rows_of(comparison: str, speeds: dict[str, list[float]], peaks: dict[str, float] | None = None, padding: float = 0.0) -> list[dict[str, Any]]:
    """One row a way and round, at these trained tokens a second."""
    return [
        {
            "way": f"{comparison}: {way}", "round": number, "seconds": 100 / speed, "tokens_a_second": speed, "padding_share": padding,
            "peak_mb": (peaks or {}).get(way, 1.0),
        }
        for way, found in speeds.items()
        for number, speed in enumerate(found)
    ]  # fmt: skip


KNOWN = [
    *rows_of("quick start", {"rollart": [20.0, 30.0, 90.0], "rollart, padded": [10.0, 20.0, 30.0], "TRL": [10.0, 10.0, 30.0]}, padding=0.25),
    *rows_of("SmolLM2-135M, float32", {"rollart": [6.0], "TRL": [4.0]}),
    *rows_of("49,152 words", {"chunked": [8.0], "whole": [10.0], "TRL": [5.0]}, {"chunked": 3.0, "whole": 12.0, "TRL": 6.0}),
    *rows_of("quick start", {"1 rank": [10.0], "2 ranks": [18.0]}),
]


def test_each_figure_is_the_median_over_rounds_of_two_ways_that_took_turns() -> None:
    found = headline(KNOWN)
    assert found["ratio_to_trl_quick_start"] == pytest.approx(3.0)  # of 2, 3 and 3
    assert found["ratio_to_trl_smollm2_135m_float32"] == pytest.approx(1.5)
    assert found["ratio_to_trl"] == pytest.approx(1.5)  # the least
    assert found["packing_speedup_quick_start"] == pytest.approx(2.0)
    assert found["padding_share_padded_quick_start"] == 0.25
    assert found["peak_memory_ratio_chunked"] == pytest.approx(0.25)
    assert found["peak_memory_ratio_to_trl"] == pytest.approx(0.5)
    assert found["chunked_speed_ratio"] == pytest.approx(0.8)
    assert found["ranks_speedup_quick_start"] == pytest.approx(1.8)


def test_ways_of_a_comparison_that_were_measured_in_another_number_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        headline([*KNOWN, *rows_of("quick start", {"TRL": [1.0]})])


def test_every_comparison_has_a_panel() -> None:
    titles = [axes.get_title(loc="left") for axes in draw(Outcome(KNOWN, {})).axes]
    assert titles == ["quick start", "SmolLM2-135M, float32", "49,152 words"]


def test_sides_whose_first_gradients_differ_are_refused() -> None:
    agree("both", {"rollart": 1.0, "TRL": 1.0009}, 1e-3)
    with pytest.raises(ValueError, match="both: the norms of the first gradients differ"):
        agree("both", {"rollart": 1.0, "TRL": 1.0011}, 1e-3)


def test_a_batch_is_drawn_from_its_seed_and_both_forms_hold_the_same_tokens() -> None:
    shape = Shape(3, 4, (2, 5), (1, 6))
    drawn = draw_batch(shape, 50)
    assert drawn == draw_batch(shape, 50)
    assert drawn != draw_batch(shape, 50, seed=1)
    assert len(drawn.prompts) == shape.sequences == 12
    assert all(drawn.prompts[i] == drawn.prompts[i // 4 * 4] for i in range(12))
    trajectories = drawn.trajectories()
    assert [t.segments[0].ids for t in trajectories] == [p + c for p, c in zip(drawn.prompts, drawn.completions, strict=True)]
    assert sum(t.sampled for t in trajectories) == drawn.trained
    groups = drawn.batch(trajectories, 7).groups
    assert [[m.score.value for m in g.members] for g in groups] == [[0.0, 1.0, 0.0, 1.0]] * 3
