"""The report holds the run's figures, stands alone, and shows what a model wrote without letting it act."""

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import fsspec
import pytest

from rollart.dashboard import figures
from rollart.dashboard.metrics import MetricsWriter
from rollart.dashboard.report import Sample, training_rewards, visible, write_report
from rollart.dashboard.summary import Stretch
from rollart.dashboard.timeline import Interval

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x00\u202e\ud800\"' &amp; http://evil.example/x.png"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def page_of(made_up, url: str, samples: tuple[Sample, ...] = (), table: list | None = None) -> str:
    with fsspec.open(write_report(url, None, made_up.rows(20, 30) if table is None else table, samples), "rt", encoding="utf-8") as file:
        return file.read()


@pytest.fixture
def run_url(made_up, tmp_path) -> str:
    url = str(tmp_path / "quickstart")
    with MetricsWriter(url) as writer:
        for line in made_up.lines(steps=20)[1:]:
            writer.write(line)
    return url


def plots(page: str) -> dict[str | None, str]:
    parser = Tags()
    parser.feed(page)
    images = [attrs for tag, attrs in parser.seen if tag == "img"]
    return {a["alt"]: base64.b64decode(a["src"].removeprefix("data:image/svg+xml;base64,")).decode() for a in images}


def test_the_report_holds_every_section_and_its_plots_are_svg(made_up, run_url: str):
    page = page_of(made_up, run_url)
    for part in (*made_up.TASKS, "Reward on held-out episodes", "Rollout ran during 100%", "trainer was idle", "2.35 GB", "paired"):
        assert part in page
    found = plots(page)
    assert list(found) == [
        "Reward by task over training steps", "Timeline of stages and sampled tokens a second", "Seconds by stage",
        "Staleness histogram", "Trajectories by fate",
    ]  # fmt: skip
    for svg in found.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_what_a_model_wrote_stays_text(made_up, run_url: str):
    sample = Sample(HOSTILE, "frozenlake", 3, None, HOSTILE, (("prompt", HOSTILE), ("response", HOSTILE)), HOSTILE)
    page = page_of(made_up, run_url, (sample,))
    parser = Tags()
    parser.feed(page)
    assert [attrs for tag, attrs in parser.seen if tag == "script"] == []
    assert all(attrs["src"].startswith("data:image/svg+xml;base64,") for tag, attrs in parser.seen if tag == "img")
    assert not any(name.startswith("on") for _, attrs in parser.seen for name in attrs)
    assert "\\u0000\\u202e\\ud800" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_a_hostile_task_name_breaks_neither_page_nor_plot(made_up, run_url: str):
    table = [r | {"task": r["task"] + "</svg><script>$x_1$"} for r in made_up.rows(20, 30)]
    page = page_of(made_up, run_url, (), table)
    assert "<script>" not in page
    for svg in plots(page).values():
        ElementTree.fromstring(svg)


def test_the_page_asks_for_nothing_outside_itself(made_up, run_url: str):
    page = page_of(made_up, run_url)
    parser = Tags()
    parser.feed(page)
    assert not [tag for tag, _ in parser.seen if tag in ("link", "script", "iframe", "object", "a")]
    assert not re.search(r"url\(|@import", page)
    policy = next(attrs["content"] for tag, attrs in parser.seen if tag == "meta" and attrs.get("http-equiv"))
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_long_text_is_cut_and_says_by_how_much(made_up, run_url: str):
    page = page_of(made_up, run_url, (Sample("a", "a", 0, 1.0, "terminated", (("response", "z" * 5000),)),))
    assert "z" * 4000 in page
    assert "z" * 4001 not in page
    assert "[1,000 more characters]" in page


def test_a_run_that_recorded_nothing_gets_a_report(made_up, tmp_path):
    page = page_of(made_up, str(tmp_path), (), [])
    assert "No evaluation was recorded." in page
    assert plots(page) == {}


def test_a_report_goes_to_any_store_and_replaces_the_last_one(made_up):
    url = "memory://reports/run"
    assert "20%" not in page_of(made_up, url, (), [])
    assert write_report(url, None, made_up.rows(20, 30)) == "memory://reports/run/report.html"
    with fsspec.open("memory://reports/run/report.html", "rt") as file:
        assert "frozenlake" in file.read()


def test_training_rewards_skip_steps_without_the_task():
    found = training_rewards([
        {"kind": "step", "step": 1, "reward": {"a": 0.5, "b": None}}, {"kind": "evaluation", "step": 1, "reward": {"a": {"mean": 9}}},
        {"kind": "step", "step": 2, "reward": {"b": 1.0}},
    ])  # fmt: skip
    assert found == {"a": [(1, 0.5)], "b": [(2, 1.0)]}


def test_invisible_characters_are_spelled_and_the_rest_stays():
    assert visible("a\tb\nü\u200b\x1b[31m\u2028") == "a\tb\nü\\u200b\\u001b[31m\\u2028"


def test_a_long_run_does_not_make_a_large_timeline():
    many = tuple(Interval("train", i, i + 0.4) for i in range(50_000))
    samples = tuple((float(i), float(i * 100)) for i in range(50_000))
    assert len(figures.timeline([Stretch(many, samples)])) < 300_000


def test_a_stage_without_a_colour_of_its_own_takes_a_spare_one():
    stages = ["train", "draft", "judge"]
    colours = [figures.stage_colour(stage, stages) for stage in stages]
    assert colours[0] == figures.STAGE_COLOURS["train"]
    assert len(set(colours)) == 3
