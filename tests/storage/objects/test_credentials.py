"""Credentials come from the environment and the usual files, and appear nowhere else."""

from __future__ import annotations

import json
import logging
import traceback

import pytest
import torch

from storage.errors import StoreUnreachable
from storage.objects.credentials import credential_fields, values
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.fault_proxy import FaultProxy

SECRET = "wJalrXUtnFEMI-very-secret-value"
SESSION = "session-token-of-some-length"


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A home folder without any credentials, and none in the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def bare(s3):
    """The options of the server without the credentials, for a client of its own."""
    return {"endpoint_url": s3["endpoint_url"], "skip_instance_cache": True}


def works(options) -> bool:
    store = ObjectStore("s3://bucket/credentials", options)
    store.write("x", b"1")
    return store.read("x") == b"1"


def test_credentials_come_from_the_environment(at_home, s3, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3["secret"])
    assert works(bare(s3))


@pytest.mark.parametrize("profile", ["default", "lab"])
def test_credentials_come_from_the_usual_file_and_its_profiles(at_home, s3, monkeypatch, profile):
    (at_home / ".aws").mkdir()
    (at_home / ".aws" / "credentials").write_text(f"[{profile}]\naws_access_key_id = {s3['key']}\naws_secret_access_key = {s3['secret']}\n")
    if profile != "default":
        monkeypatch.setenv("AWS_PROFILE", profile)
    assert works(bare(s3))


def test_no_credentials_and_a_profile_that_is_not_there_are_clear_errors(at_home, s3, monkeypatch):
    with pytest.raises(StoreUnreachable, match="credentials"):
        works(bare(s3))
    monkeypatch.setenv("AWS_PROFILE", "nosuch")
    with pytest.raises(StoreUnreachable, match="nosuch"):
        works(bare(s3))


def test_a_broken_key_file_is_a_clear_error_without_its_content(at_home, monkeypatch):
    key = at_home / "key.json"
    key.write_text(json.dumps({"type": "service_account", "private_key": SECRET, "client_email": "a@b"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    with pytest.raises(StoreUnreachable) as caught:
        ObjectStore("gs://bucket/x", {"token": "google_default", "skip_instance_cache": True}).read("x")
    said = "".join(traceback.format_exception(caught.value))
    assert "key.json" in said or "service account" in said.lower()
    assert SECRET not in said


def test_credentials_are_in_no_log_error_repr_or_object(s3, caplog, monkeypatch):
    monkeypatch.setattr("storage.objects.retries.FIRST_PAUSE_S", 0.001)
    options = {**s3, "client_kwargs": {"aws_session_token": SESSION}}
    said = []
    with FaultProxy(s3["endpoint_url"]) as proxy, caplog.at_level(logging.DEBUG, "storage"):
        weights = WeightStore("s3://bucket/secrets", {**s3, "endpoint_url": proxy.url})
        proxy.faults("slow down", times=2)
        weights.publish({"a": torch.ones(3)}, version=Version(0, 0), metadata={"note": "x"}).result(60)
        proxy.faults("server error", times=float("inf"))
        for call in (weights.pull, weights.check_writable, lambda: WeightStore("s3://nosuch-bucket/x", options).pull()):
            try:
                call()
            except StoreUnreachable as error:
                said += ["".join(traceback.format_exception(error)), repr(error)]
        proxy.heal()
        said += [repr(weights), weights.url, repr(weights.objects)]
        said += [weights.objects.read(path).decode("latin-1") for path in weights.objects.list()]
    assert any(record.name == "storage.objects.retries" for record in caplog.records)
    said += [record.getMessage() for record in caplog.records if record.name.startswith("storage")]
    assert len(said) > 6
    for secret in (s3["secret"], SESSION):
        assert not [text for text in said if secret in text]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"key": "AKIA", "secret": "s", "endpoint_url": "http://x", "anon": False}, ["key", "secret"]),
        ({"client_kwargs": {"aws_session_token": "t", "region_name": "r"}}, ["client_kwargs.aws_session_token"]),
        ({"token": {"private_key": "k"}}, ["token"]),
        ({"token": "anon"}, []),
        ({"token": "/etc/key.json", "project": "p"}, []),
        ({"connection_string": "a=b", "account_key": "k", "sas_token": "t", "account_name": "n"}, ["connection_string", "account_key", "sas_token"]),
        ({"config_kwargs": {"signature_version": "s3v4"}, "requester_pays": True, "asynchronous": False}, []),
        ({"username": "u", "password": "p"}, ["password"]),
    ],
)
def test_what_holds_a_credential_is_known_by_its_name(options, fields):
    assert credential_fields(options) == fields


def test_a_credential_is_known_in_every_spelling_that_a_url_gives_it():
    assert set(values({"token": "ya29.a/b+c d="})) == {"ya29.a/b+c d=", "ya29.a/b%2Bc%20d%3D", "ya29.a%2Fb%2Bc%20d%3D", "ya29.a%2Fb%2Bc+d%3D"}
