from __future__ import annotations

import os
import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor, wait

import fsspec
import numpy as np
import pytest

from storage.errors import ConditionIgnored, ObjectMissing, StoreUnreachable, UnsafePath
from storage.objects.store import ObjectStore


def test_write_then_read_list_exists_and_delete(objects):
    objects.write("a/b/one", b"1")
    objects.write("a/two", b"22")
    objects.write("ab/three", b"333")
    objects.write("a/two", b"two")
    assert objects.read("a/two") == b"two"
    assert objects.list("a") == ["a/b/one", "a/two"]
    assert objects.list() == ["a/b/one", "a/two", "ab/three"]
    assert objects.exists("a/two") and not objects.exists("a") and not objects.exists("a/t")
    objects.delete("a", recursive=True)
    objects.delete("a", recursive=True)
    objects.delete("absent")
    assert objects.list() == ["ab/three"]
    with pytest.raises(ObjectMissing, match="a/two"):
        objects.read("a/two")


def test_an_empty_store_lists_nothing(objects):
    assert objects.list("commits") == []


def test_a_part_is_read_into_a_buffer_and_the_object_end_is_told(objects):
    objects.write("x", bytes(range(10)))
    buffer = np.zeros(4, dtype=np.uint8)
    assert objects.read_into("x", buffer, 3) > 7
    assert buffer.tolist() == [3, 4, 5, 6]
    assert objects.read_into("x", buffer, 6) == 10
    assert buffer.tolist() == [6, 7, 8, 9]
    assert objects.read_into("x", buffer, 8) == 10
    assert buffer[:2].tolist() == [8, 9]


def test_create_puts_an_object_only_if_there_is_none(objects):
    assert objects.create("x", b"first")
    assert not objects.create("x", b"second")
    assert objects.read("x") == b"first"


def test_of_eight_racing_creators_one_wins(objects):
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: objects.create("x", str(i).encode()), range(8)))
    assert won.count(True) == 1
    assert objects.read("x") == str(won.index(True)).encode()


def test_nothing_is_written_to_memory_in_the_middle_of_a_listing(monkeypatch):
    objects = ObjectStore("memory://watched")
    early = []

    class Watched(dict):
        def items(self):
            writing = pool.submit(objects.write, "another", b"1")
            early.extend(wait([writing], timeout=0.2).done)
            return super().items()

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.store", Watched())
        objects.write("one", b"1")
        assert objects.list() == ["one"]
        assert not early
    assert objects.exists("another")


def test_a_listing_shows_what_another_client_wrote_since(place):
    one, other = ObjectStore(*place), ObjectStore(*place)
    other.write("d/a", b"")
    assert one.list("d") == ["d/a"]
    # Another process leaves this one's cache as it is, so the write goes past this process's client.
    if place[0].startswith("s3"):
        fs = fsspec.filesystem("s3", skip_instance_cache=True, **place[1])
        fs.pipe_file(f"{place[0]}/d/b", b"")
    else:
        other.write("d/b", b"")
    assert one.list("d") == ["d/a", "d/b"]
    assert one.exists("d/b")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a\\b", "a\0b", "s3://b/x", "a/", "x" * 2000])
def test_a_path_that_leaves_the_store_is_refused(objects, path):
    def write(path: str) -> None:
        objects.write(path, b"")

    def create(path: str) -> None:
        objects.create(path, b"")

    for call in (objects.read, objects.exists, objects.delete, objects.child, write, create):
        with pytest.raises(UnsafePath):
            call(path)


def test_a_link_that_leaves_the_store_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "store").mkdir()
    os.symlink(tmp_path / "secret", tmp_path / "store" / "link")
    os.symlink(tmp_path, tmp_path / "store" / "folder")
    store = ObjectStore(str(tmp_path / "store"))
    for path in ("link", "folder/secret"):
        with pytest.raises(UnsafePath, match="symbolic link"):
            store.read(path)


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path, put):
    put(tmp_path / "x")
    store = ObjectStore(str(tmp_path))
    for read in (store.read, lambda path: store.read_into(path, np.empty(4, dtype=np.uint8))):
        with pytest.raises(StoreUnreachable, match=r"reading .*/x failed"), ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read, "x")
            if not wait([reading], timeout=5).done:
                os.close(os.open(tmp_path / "x", os.O_WRONLY | os.O_NONBLOCK))  # lets a reader go that waits
            reading.result()


def test_a_child_is_the_store_of_what_is_under_it(objects):
    child = objects.child("run/weights")
    child.write("x", b"1")
    assert objects.list() == ["run/weights/x"]
    assert child.list() == ["x"]
    assert child.url == f"{objects.url}/run/weights"


def test_a_store_travels_by_pickle(objects):
    objects.write("x", b"1")
    again = pickle.loads(pickle.dumps(objects))  # noqa: S301
    assert again.url == objects.url
    assert again.read("x") == b"1"


def test_a_relative_path_means_the_same_folder_after_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ObjectStore("here")
    monkeypatch.chdir("/")
    store.write("x", b"1")
    assert (tmp_path / "here" / "x").read_bytes() == b"1"


def test_a_writable_store_passes_the_check_and_keeps_nothing_of_it(objects):
    objects.check_writable()
    assert objects.list() == []


def test_an_unwritable_place_is_one_clear_error(tmp_path, s3, monkeypatch):
    monkeypatch.setattr("storage.objects.retries.FIRST_PAUSE_S", 0.001)
    (tmp_path / "file").write_bytes(b"")
    for store in (
        ObjectStore(str(tmp_path / "file" / "store")),
        ObjectStore("/proc/no-such-store"),
        ObjectStore("s3://no-such-bucket/run", s3),
        ObjectStore("s3://bucket/run", {**s3, "endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}),
    ):
        with pytest.raises(StoreUnreachable, match="check that the folder or bucket exists") as caught:
            store.check_writable()
        assert store.url in str(caught.value)
        assert "test-secret-value" not in str(caught.value)


@pytest.mark.parametrize("url", ["nosuch://x/y", "simplecache::s3://bucket/x"])
def test_a_url_that_is_no_store_is_refused_by_name(url):
    with pytest.raises(StoreUnreachable, match=url.partition(":")[0]):
        ObjectStore(url)


def test_a_server_that_ignores_the_condition_is_found_out(objects, monkeypatch):
    def overwrite(path: str, data: bytes) -> bool:
        objects.write(path, data)
        return True

    monkeypatch.setattr(objects._backend, "create", overwrite)
    with pytest.raises(ConditionIgnored, match="only one process"):
        objects.check_writable()


def test_credentials_are_in_no_repr_and_no_error(s3):
    store = ObjectStore("s3://bucket/run", {**s3, "token": "session-token-value"})
    text = repr(store) + str(store.url)
    with pytest.raises(StoreUnreachable) as caught, store._translated("reading", "x"):
        raise OSError("refused: test-secret-value session-token-value http://user:word@host/")
    text += str(caught.value) + repr(caught.value) + repr(caught.value.__cause__)
    assert "refused" in text
    for secret in ("test-secret-value", "session-token-value", "user:word"):
        assert secret not in text


@pytest.mark.parametrize("code", ["PreconditionFailed", "ConditionalRequestConflict"])
def test_what_s3_servers_say_of_a_lost_race_is_understood(s3, monkeypatch, code):
    class Refused(Exception):
        def __init__(self) -> None:
            self.response = {"Error": {"Code": code}}

    class Client:
        async_impl = False

        def __init__(self) -> None:
            self.calls = 0

        def pipe_file(self, key: str, data: bytes, mode: str, **_: object) -> None:
            assert mode == "create"
            self.calls += 1
            if self.calls == 1:
                raise OSError(22, "refused") from Refused()

        def invalidate_cache(self) -> None: ...

        def getxattr(self, key: str, name: str) -> str:
            return "the mark of another attempt"

    store = ObjectStore("s3://bucket/race", s3)
    client = Client()
    monkeypatch.setattr(store, "_keeps_condition", lambda: True)
    monkeypatch.setattr(store._backend, "_fs", client)
    assert store.create("x", b"") is (code == "ConditionalRequestConflict")
    assert client.calls == (1 if code == "PreconditionFailed" else 2)


def test_a_killed_local_write_shows_nothing(tmp_path, monkeypatch):
    store = ObjectStore(str(tmp_path))
    store.write("x", b"old")

    def stopped(*_: str) -> None:
        raise KeyboardInterrupt

    for name in ("replace", "link"):
        monkeypatch.setattr(os, name, stopped)
    with pytest.raises(KeyboardInterrupt):
        store.write("x", b"new")
    with pytest.raises(KeyboardInterrupt):
        store.create("y", b"new")
    (tmp_path / ".tmp-of-a-killed-process").write_bytes(b"new")
    assert store.list() == ["x"]
    assert store.read("x") == b"old"


class Overwriting:
    """The S3 client of a server that ignores the condition of a creation."""

    async_impl = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.writes = 0

    def pipe_file(self, key: str, data: bytes, mode: str = "overwrite", **_: object) -> None:
        self.writes += 1
        self.objects[key] = data

    def cat_file(self, key: str, **_: object) -> bytes:
        return self.objects[key]

    def rm_file(self, key: str) -> None:
        del self.objects[key]

    def info(self, key: str) -> dict[str, str]:
        if key not in self.objects:
            raise FileNotFoundError(key)
        return {"type": "file"}

    def invalidate_cache(self) -> None: ...


@pytest.fixture
def overwriting(s3, monkeypatch):
    """Makes stores over one such client, each as a new process would open it."""
    client = Overwriting()
    monkeypatch.setattr("storage.objects.clients._s3_class", lambda: lambda **_: client)
    monkeypatch.setattr(Overwriting, "_strip_protocol", lambda self, url: url.removeprefix("s3://"), raising=False)
    monkeypatch.setattr("storage.objects.conditions._places", {})

    def make(**options: bool) -> ObjectStore:
        return ObjectStore("s3://elsewhere/run", s3, **options)

    make.client = client
    return make


def test_the_first_creation_finds_a_server_out_that_ignores_the_condition(overwriting):
    store = overwriting()
    for _ in range(2):
        with pytest.raises(ConditionIgnored, match="single_writer=True and keep to the rule that only one process may ever publish"):
            store.child("weights").create("x", b"1")
    assert overwriting.client.writes == 2  # asked once, with an object that is gone again
    assert overwriting.client.objects == {}
    with pytest.raises(ConditionIgnored):
        store.check_writable()


def test_a_single_writer_is_told_the_rule_once_and_overwrites_nothing(overwriting, caplog):
    store = pickle.loads(pickle.dumps(overwriting(single_writer=True)))  # noqa: S301
    assert store.child("weights").create("x", b"1")
    assert not store.child("weights").create("x", b"2")
    store.check_writable()
    assert overwriting.client.objects == {"elsewhere/run/weights/x": b"1"}
    assert [record.getMessage().count("only one process may ever publish there") for record in caplog.records] == [1]


def test_a_server_is_asked_once_a_process_whether_it_keeps_conditions(s3, monkeypatch):
    monkeypatch.setattr("storage.objects.conditions._places", {})
    asked = []
    monkeypatch.setattr("storage.objects.store._overwrites", lambda remote: bool(asked.append(remote)))
    for name in ("a", "b"):
        store = ObjectStore(f"s3://bucket/{uuid.uuid4().hex}", s3)
        assert store.create(name, b"")
        assert store.child("c").create(name, b"")
    assert len(asked) == 1


def test_a_failed_delete_of_many_is_no_success(objects, monkeypatch):
    if not hasattr(objects._backend, "_fs"):
        pytest.skip("a folder's client tells each failure itself")
    objects.write("d/a", b"")
    objects.write("d/b", b"")
    monkeypatch.setattr(objects._backend, "_retried", kept_from_deleting(objects._backend._retried))
    with pytest.raises(StoreUnreachable, match="kept 2 of 2 objects"):
        objects.delete("d", recursive=True)
    assert objects.list() == ["d/a", "d/b"]


def kept_from_deleting(retried):
    """What a server does that refuses to delete: s3fs then says nothing."""

    def call(work, doing, path, **options):
        return None if doing == "deleting" else retried(work, doing, path, **options)

    return call
