"""How versions and stores are named, and tags."""

from __future__ import annotations

import pytest

from storage.errors import BadReference, Damaged, UnknownTag, VersionMissing
from storage.format import layout
from storage.refs import parse_location
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.scripted import put, whole

V0, V1 = Version(0, 0), Version(0, 1)


@pytest.mark.parametrize(
    ("text", "url", "ref"),
    [
        ("s3://bucket/run/weights@0-42", "s3://bucket/run/weights", "0-42"),
        ("s3://bucket/run/weights@best", "s3://bucket/run/weights", "best"),
        ("s3://bucket/run/weights", "s3://bucket/run/weights", None),
        ("s3://key:word@host/run/weights", "s3://key:word@host/run/weights", None),
        ("s3://key:word@host/run/weights@newest", "s3://key:word@host/run/weights", "newest"),
        ("s3://key:word@host", "s3://key:word@host", None),
        ("abfs://box@account.dfs.core.windows.net", "abfs://box@account.dfs.core.windows.net", None),
        ("abfs://box@account.dfs.core.windows.net/w@1-3", "abfs://box@account.dfs.core.windows.net/w", "1-3"),
        ("s3://bucket@best", "s3://bucket", "best"),
        ("memory://name@0-1", "memory://name", "0-1"),
        ("/data/run@1/weights", "/data/run@1/weights", None),
        ("/data/run@1@newest", "/data/run@1", "newest"),
        ("weights@0-42", "weights", "0-42"),
        ("gs://bucket/@best", "gs://bucket/", "best"),
        ("file:///data/w@best", "file:///data/w", "best"),
    ],
)
def test_a_location_is_a_url_and_what_follows_its_last_part_s_last_at(text, url, ref):
    assert parse_location(text) == (url, ref)


@pytest.mark.parametrize("text", ["s3://bucket/w@", "@best", "/data/w@be st", "s3://@best", "/data/w@0-1-2/", "/w@../x@"])
def test_a_location_whose_reference_can_name_nothing_is_refused_or_left_as_a_path(text):
    if text.endswith("/"):
        assert parse_location(text) == (text, None)
    else:
        with pytest.raises(BadReference):
            parse_location(text)


@pytest.mark.parametrize("text", ["", " ", "s3://", "gs:///"])
def test_a_text_that_names_no_store_is_refused(text):
    with pytest.raises(BadReference, match="names no store"):
        parse_location(text)


def test_everything_that_takes_a_version_takes_its_spelling_a_tag_or_newest(place):
    weights = WeightStore(*place)
    put(weights, V0)
    put(weights, V1)
    assert weights.tag("best", "0-0") == V0
    assert [weights.resolve(ref) for ref in (V0, "0-0", "best", "newest", None)] == [V0, V0, V0, V1, V1]
    assert weights.pull("best")["w"][0] == 1e6 and weights.pull("newest")["w"][1] == 1e6 + 1
    assert weights.tag("again", "best") == V0
    with weights.lease("best", 60) as lease:
        assert lease.version == V0
    assert weights.verify("best").versions == (V0,)
    with pytest.raises(UnknownTag, match="'bset'"):
        weights.pull("bset")
    with pytest.raises(BadReference, match="can't be a tag"):
        weights.resolve("../../secret")


def test_newest_of_an_empty_store_is_missing(place):
    for ref in (None, "newest"):
        with pytest.raises(VersionMissing, match="any version"):
            WeightStore(*place).resolve(ref)


def test_a_tag_moves_whole_and_goes_when_it_is_taken_away(place):
    weights = WeightStore(*place)
    put(weights, V0)
    put(weights, V1)
    assert weights.tags() == {}
    weights.tag("best", V0)
    weights.tag("final.v2", V1)
    weights.tag("best", V1)
    assert weights.tags() == {"best": V1, "final.v2": V1}
    weights.untag("best")
    assert weights.tags() == {"final.v2": V1}
    with pytest.raises(UnknownTag, match="'best'"):
        weights.untag("best")


@pytest.mark.parametrize("name", ["0-42", "00-7", "newest", "", ".hidden", "a/b", "a b", "x" * 101, "@", "é"])
def test_a_name_that_could_be_taken_for_something_else_is_no_tag(tmp_path, name):
    weights = WeightStore(str(tmp_path))
    put(weights, V0)
    with pytest.raises(BadReference):
        weights.tag(name, V0)
    assert weights.tags() == {}


def test_a_tag_on_a_version_that_is_not_there_is_refused_and_leaves_the_tag_where_it_was(place):
    weights = WeightStore(*place)
    put(weights, V0)
    weights.tag("best", V0)
    with pytest.raises(VersionMissing, match="0-7"):
        weights.tag("best", Version(0, 7))
    assert weights.tags() == {"best": V0} and whole(weights, V0)


def test_a_changed_tag_is_found(place):
    weights = WeightStore(*place)
    put(weights, V0)
    weights.tag("best", V0)
    good = weights.objects.read(layout.tag_path("best"))
    weights.objects.write(layout.tag_path("best"), good.replace(b"0-0", b"0-1"))
    with pytest.raises(Damaged, match=r"tags/best\.json"):
        weights.pull("best")
