"""The staleness study's arithmetic, its criterion, and which runs it takes as finished; the runs themselves are the command's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.outcome import Outcome
from benchmarks.staleness import WAYS, difference, draw, headline, smoothed, within_noise
from benchmarks.staleness_runs import QUICK, keep, rows, stored
from rollart.dashboard.estimates import mean_estimate

STARTS = (0.2, 0.25, 0.3, 0.35, 0.4)
LOST = (0.00, 0.02, -0.02, 0.03, -0.01)
"""What alpha 1 gains on alpha 0, by seed; alpha 2 gains 0.2 less, always."""


def known_rows() -> list[dict]:
    found = []
    for alpha in range(3):
        for seed, before in enumerate(STARTS):
            after = before + 0.3 + (LOST[seed] if alpha else 0.0) - (0.2 if alpha == 2 else 0.0)
            tokens = {str(age): 1 / (alpha + 1) for age in range(alpha + 1)}
            found.append({"way": f"alpha {alpha}", "seed": seed, "before": before, "after": after, "stale_tokens": tokens, "curve": [before, after]})
    return found


def test_differences_are_paired_by_seed_so_that_what_seeds_share_cancels() -> None:
    found = difference(known_rows(), "alpha 1")
    assert found.mean == pytest.approx(0.004)
    deviation = (sum((x - 0.004) ** 2 for x in LOST) / 4) ** 0.5
    assert found.high - found.mean == pytest.approx(2.7764451 * deviation / 5**0.5)  # t, 4 degrees of freedom
    alone = mean_estimate([row["after"] for row in known_rows() if row["way"] == "alpha 1"])
    assert found.high - found.low < 0.4 * (alone.high - alone.low)


def test_a_loss_is_within_noise_only_if_the_interval_holds_0_or_ends_above_what_is_tolerated() -> None:
    assert within_noise(mean_estimate([-0.02, 0.01, 0.0]))
    assert within_noise(mean_estimate([-0.0201, -0.02, -0.0199]))
    assert not within_noise(mean_estimate([-0.0401, -0.04, -0.0399]))
    assert not within_noise(mean_estimate([0.01]))
    told = headline(known_rows())
    assert (told["alpha_1_within_noise"], told["alpha_2_within_noise"]) == (1.0, 0.0)
    assert told["alpha_0_rise"] == pytest.approx(0.3) and told["alpha_2_difference"] == pytest.approx(-0.196)


def test_a_curves_point_is_the_mean_of_the_steps_up_to_it() -> None:
    assert smoothed([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]


def test_the_picture_is_drawn_from_rows(tmp_path: Path) -> None:
    draw(Outcome(known_rows(), {})).savefig(tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_counts_for_the_settings_that_it_was_taken_with(tmp_path: Path) -> None:
    keep(tmp_path / "run", ["train.steps=5"], {"after": 0.5})
    assert stored(tmp_path / "run", ["train.steps=5"]) == {"after": 0.5}
    assert stored(tmp_path / "run", ["train.steps=6"]) is None
    assert stored(tmp_path / "other", ["train.steps=5"]) is None


def test_a_study_whose_runs_are_all_kept_runs_nothing_and_gives_them_by_way_and_seed(tmp_path: Path) -> None:
    for way in WAYS:
        keep(tmp_path / f"{way.name.replace(' ', '-')}-seed0", [*QUICK.trained(), *way.overrides], {"way": way.name, "seed": 0})
    assert rows(WAYS, QUICK, tmp_path) == [{"way": f"alpha {alpha}", "seed": 0} for alpha in range(3)]
