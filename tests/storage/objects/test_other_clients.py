"""Clients of fsspec that have no care taken of them by name: what they say of their listings and options."""

from __future__ import annotations

import errno

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from storage.errors import StoreUnreachable
from storage.keeping.retention import Retention
from storage.objects.clients import refusal
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore


class Failing(LocalFileSystem):
    """A folder behind a client of its own; a folder of a name in `broken` can't be listed."""

    protocol = "failing"
    broken: dict[str, int] = {}  # noqa: RUF012  shared by all instances, which fsspec makes

    def ls(self, path, detail=False, **kwargs):
        code = self.broken.get(path.rstrip("/").rpartition("/")[2])
        if code is not None:
            raise OSError(code, "listing failed")
        return super().ls(path, detail=detail, **kwargs)


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """The URL of an empty store behind such a client."""
    monkeypatch.setattr(Failing, "broken", {})
    fsspec.register_implementation("failing", Failing, clobber=True)
    return f"failing://{tmp_path}/store"


def test_a_listing_that_fails_is_no_empty_store(failing):
    weights = WeightStore(failing, {"auto_mkdir": True})
    for step in range(3):
        weights.publish({"w": torch.full((4,), float(step))}, step=step, background=False)
    weights.tag("best", Version(0, 0))
    Failing.broken["tags"] = errno.EIO
    with pytest.raises(StoreUnreachable, match=r"listing .*tags failed"):
        weights.tags()
    with pytest.raises(StoreUnreachable, match="listing failed"):
        weights.gc(Retention(), grace_s=0)
    Failing.broken.clear()
    assert weights.tags() == {"best": Version(0, 0)}
    assert weights.versions() == [Version(0, 0), Version(0, 1), Version(0, 2)]


def test_a_folder_in_the_middle_that_cannot_be_listed_is_an_error(failing):
    objects = ObjectStore(failing, {"auto_mkdir": True})
    objects.write("a/b/c/one", b"1")
    objects.write("a/two", b"22")
    assert [(info.path, info.bytes) for info in objects.infos()] == [("a/b/c/one", 1), ("a/two", 2)]
    Failing.broken["b"] = errno.EACCES
    with pytest.raises(StoreUnreachable, match="listing failed"):
        objects.list()


def test_a_folder_that_is_not_there_or_goes_meanwhile_is_empty(failing):
    objects = ObjectStore(failing, {"auto_mkdir": True})
    assert objects.list() == [] and objects.list("tags") == []
    objects.write("a/b/one", b"1")
    objects.write("a/two", b"2")
    Failing.broken["b"] = errno.ENOENT
    assert objects.list() == ["a/two"]


def test_a_server_that_is_not_there_has_no_empty_listing(monkeypatch):
    monkeypatch.setattr("storage.objects.retries.FIRST_PAUSE_S", 0.001)
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1"):
        WeightStore("http://127.0.0.1:1/x").versions()


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("s3://bucket/x", {"zzz": "its-value", "key": "k-value", "secret": "s-value"}, "options given: key, secret, zzz"),
        ("s3://bucket/x", {"config_kwargs": 5}, "options given: config_kwargs"),
        ("s3://bucket/x", {"config_kwargs": {"zzz": "its-value"}}, "options given: config_kwargs"),
        ("s3://bucket/x", {"client_kwargs": 5}, "options given: client_kwargs"),
        ("gs://bucket/x", {"token": 5}, "options given: token"),
        ("http://127.0.0.1:1/x", {"zzz": "its-value"}, "options given: zzz"),
        ("failing:///x", {"no_such_module": 1, "protocol": object}, "options given: no_such_module, protocol"),
        ("nosuch://x", {"zzz": "its-value"}, "nosuch.*options given: zzz"),
    ],
)
def test_options_that_a_client_refuses_are_one_error_that_has_their_names_and_not_their_values(failing, url, options, said):
    with pytest.raises(StoreUnreachable, match=said) as caught:
        ObjectStore(url, options).list()
    assert "-value" not in str(caught.value) and "\n" not in str(caught.value)


def test_an_option_that_the_client_quotes_is_not_quoted_again():
    assert str(refusal(ValueError("invalid: 'its-value'"), {"port": "its-value"})).endswith("(ValueError); options given: port")


@pytest.mark.parametrize("url", ["", "  ", "s3://", "memory:///", "file://", "file:///"])
def test_a_url_that_names_nothing_is_refused_and_means_no_root(url):
    for opened in (ObjectStore, WeightStore):
        with pytest.raises(StoreUnreachable, match="names no store"):
            opened(url)


def test_a_bucket_that_is_not_there_is_no_missing_version_or_tag(s3):
    weights = WeightStore("s3://no-such-bucket/run", s3)
    for call in (lambda: weights.tag("best", "0-0"), lambda: weights.untag("best"), lambda: weights.lease("0-0", 60).__enter__()):
        with pytest.raises(StoreUnreachable, match="no-such-bucket"):
            call()
