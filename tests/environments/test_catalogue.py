"""Environments that other packages bring by entry points, and extras that aren't installed."""

from pathlib import Path

import pytest

from rollart.environments.catalogue import SHIPPED, Entry, known
from rollart.environments.registry import UnknownEnvironment, make

GAME = """
from rollart.environments.protocol import StepResult

class Toss:
    def __init__(self, sides=2): self.sides = sides
    def reset(self, seed): return f"{seed % self.sides} of {self.sides}"
    def step(self, action): return StepResult("", 1.0, terminated=True)
    def close(self): pass
"""


def install(folder: Path, package: str, points: str) -> None:
    """A package as pip leaves it: its module, and beside it the metadata that names its entry points."""
    (folder / f"{package}.py").write_text(GAME)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[rollart.environments]\n{points}\n")


def test_an_installed_package_brings_an_environment_by_name(tmp_path, monkeypatch):
    install(tmp_path, "tossing", "toss = tossing:Toss")
    monkeypatch.syspath_prepend(tmp_path)
    assert make("toss", sides=6).reset(8) == "2 of 6"
    assert known()["toss"] == Entry("toss", "tossing:Toss", "tossing 1.2")
    assert "toss" not in SHIPPED


def test_a_name_of_rollarts_own_stays_its_own(tmp_path, monkeypatch):
    install(tmp_path, "usurping", "guess_number = usurping:Toss")
    monkeypatch.syspath_prepend(tmp_path)
    assert make("guess_number").reset(0).startswith("guess 1 to 9")
    assert known()["guess_number"].origin == "rollart"


def test_a_name_that_two_packages_bring_is_refused_and_both_are_named(tmp_path, monkeypatch):
    install(tmp_path, "first_toss", "toss = first_toss:Toss")
    install(tmp_path, "second_toss", "toss = second_toss:Toss")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvironment, match=r"toss.*(first_toss 1.2.*second_toss 1.2|second_toss 1.2.*first_toss 1.2).*import path"):
        make("toss")
    assert make("first_toss:Toss").reset(3) == "1 of 2"


def test_an_environment_whose_extra_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(SHIPPED, "lunar", Entry("lunar", "rollart.environments.lunar:Lunar", extra="lunar", needs=("lunar_lib_of_nobody",)))
    with pytest.raises(UnknownEnvironment, match=r"'lunar' needs lunar_lib_of_nobody: pip install 'rollart\[lunar\]'"):
        make("lunar")
