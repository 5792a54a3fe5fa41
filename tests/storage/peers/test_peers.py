"""Chunks from other hosts: one copy leaves the store, nobody outside of the run reads, and no peer can do harm but to speed."""

from __future__ import annotations

import hashlib
import http.client
import logging
import pickle
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from storage.arrays.packing import byte_view, pack
from storage.errors import Damaged, ObjectMissing
from storage.format import layout
from storage.objects.store import ObjectStore
from storage.peers.cache import CacheClosed, ChunkCache
from storage.peers.choice import Peers
from storage.peers.server import ChunkServer
from storage.peers.store import PeerStore
from storage.version import Version
from storage.weights import WeightStore
from tests.storage.histories import data_paths, flip
from tests.storage.peer_host import hosts

TOKEN = "the-run's-own"
V0 = Version(0, 0)
CHUNK = 4000


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightStore:
    """Version 0-0 in 26 chunks."""
    monkeypatch.setattr("storage.weights.pack", partial(pack, chunk_bytes=CHUNK))
    weights = WeightStore(str(tmp_path / "store"))
    weights.publish({"a": torch.randn(25_000), "b": torch.arange(7)}, version=V0).result(60)
    return weights


@pytest.fixture
def state(weights: WeightStore) -> dict[str, torch.Tensor]:
    return weights.pull()


@pytest.fixture
def serving() -> Iterator:
    """Starts chunk servers, which end with the test."""
    servers: list[ChunkServer] = []

    def start(store: ObjectStore, token: str = TOKEN, **more: int) -> ChunkServer:
        servers.append(ChunkServer(ChunkCache(store), token, "127.0.0.1", **more))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def reader(weights: WeightStore, urls: list[str], token: str = TOKEN, **limits: float) -> tuple[PeerStore, Peers]:
    peers = Peers(token, **limits)
    peers.use(urls)
    return PeerStore.over(weights.objects, peers), peers


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def stored_bytes(weights: WeightStore) -> int:
    return sum(chunk.bytes for array in weights.commit(V0).arrays.values() for chunk in array.chunks)


def no_peer() -> tuple[socket.socket, str]:
    """A port that takes connections and says nothing."""
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_four_host_processes_at_once_take_one_copy_from_the_store(weights, state):
    digest = hashlib.sha256(b"".join(bytes(byte_view(state[name])) for name in sorted(state))).hexdigest()
    with hosts(4, weights.url, TOKEN) as four:
        urls = [host.url for host in four]
        for host in four:
            host.pull(urls)
        answers = [host.answer() for host in four]
        assert [host.end() for host in four] == [0] * 4
    size = stored_bytes(weights)
    assert {answer["sha256"] for answer in answers} == {digest}
    assert [answer["read"] for answer in answers] == [0] * 4
    assert sum(answer["served"] for answer in answers) == size
    assert max(answer["served"] for answer in answers) < size, "no host is the owner of everything"
    assert [answer["peers"] for answer in answers] == [size] * 4


def test_an_owner_that_is_killed_while_it_downloads_is_replaced_and_its_port_is_gone(weights, state, serving, caplog):
    well = serving(weights.objects)
    with hosts(1, weights.url, TOKEN, stuck=True) as (host,):
        store, peers = reader(weights, [well.url, host.url])
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(WeightStore.over(store).pull)
            assert host.answer() in data_paths(weights, 0)
            host.process.kill()
            assert equal(pulling.result(60), state)
        assert peers.left_out == {host.url}
        assert store.bytes_read == 0 and well.cache.downloaded == stored_bytes(weights), "the other one stood in"
        assert sum(host.url in record.getMessage() for record in caplog.records) == 1
        host.process.join(30)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", urlsplit(host.url).port), 5)


def test_wrong_bytes_of_a_peer_are_read_from_the_store_instead_and_cost_the_peer_its_place(weights, state, serving, tmp_path, caplog):
    shutil.copytree(weights.url, tmp_path / "false")
    false = ObjectStore(str(tmp_path / "false"))
    for path in data_paths(weights, 0):
        flip(false, path, 40)
    liar, well = serving(false), serving(weights.objects)
    store, peers = reader(weights, [liar.url, well.url])
    assert equal(WeightStore.over(store).pull(), state)
    assert peers.left_out == {liar.url}
    assert 0 < store.bytes_read < stored_bytes(weights), "only what was in flight from the liar"
    assert "isn't what the store has" in caplog.text


def test_a_chunk_that_a_peer_has_cut_short_is_read_from_the_store(weights, state, serving, tmp_path):
    shutil.copytree(weights.url, tmp_path / "short")
    short = ObjectStore(str(tmp_path / "short"))
    for path in data_paths(weights, 0):
        short.write(path, short.read(path)[:-3])
    liars = [serving(short), serving(short)]
    store, peers = reader(weights, [liar.url for liar in liars])
    assert equal(WeightStore.over(store).pull(), state)
    assert peers.left_out == {liar.url for liar in liars}


def test_a_part_of_a_chunk_with_wrong_bytes_is_read_again_too(tmp_path, serving):
    weights = WeightStore(str(tmp_path / "store"))
    weights.publish({f"t{i}": torch.randn(1 << 15) for i in range(8)}, version=V0).result(60)  # 128 KiB each, in one chunk
    wanted = weights.pull(names=["t5"])
    shutil.copytree(weights.url, tmp_path / "false")
    false = ObjectStore(str(tmp_path / "false"))
    (path,) = data_paths(weights, 0)
    good = bytearray(false.read(path))
    good[5 * (128 << 10) + 77] ^= 1
    false.write(path, bytes(good))
    liars = [serving(false), serving(false)]
    store, peers = reader(weights, [liar.url for liar in liars])
    assert equal(WeightStore.over(store).pull(names=["t5"]), wanted)
    assert len(peers.left_out) == 1


def test_what_is_damaged_in_the_store_itself_is_damaged_and_no_peers_fault(weights, serving):
    flip(weights.objects, data_paths(weights, 0)[3], 40)
    servers = [serving(weights.objects), serving(weights.objects)]
    store, peers = reader(weights, [server.url for server in servers])
    with pytest.raises(Damaged, match="changed bytes"):
        WeightStore.over(store).pull()
    assert peers.left_out == set()


def test_a_chunk_that_is_gone_from_the_store_is_damaged_and_no_peers_fault(weights, serving):
    weights.objects.delete(data_paths(weights, 0)[3])
    servers = [serving(weights.objects), serving(weights.objects)]
    store, peers = reader(weights, [server.url for server in servers])
    with pytest.raises(Damaged, match="missing"):
        WeightStore.over(store).pull(names=["a"], out={"a": torch.empty(25_000)})
    assert peers.left_out == set()


def test_a_peer_that_never_answers_costs_one_time_out(weights, state):
    (silent, url), (other, other_url) = no_peer(), no_peer()
    store, peers = reader(weights, [url, other_url], answer_s=0.1)
    assert equal(WeightStore.over(store).pull(), state)
    assert equal(WeightStore.over(store).pull(), state)
    assert peers.left_out == {url, other_url}
    assert store.bytes_read == 2 * stored_bytes(weights)
    for listening in (silent, other):
        listening.setblocking(False)
        count = 0
        with suppress(BlockingIOError):
            while True:
                listening.accept()[0].close()
                count += 1
        assert 1 <= count <= store.parallel, "no more than were under way at once"
        listening.close()


def test_a_peer_that_is_well_again_is_asked_again(weights, serving):
    servers = [serving(weights.objects), serving(weights.objects)]
    store, peers = reader(weights, [server.url for server in servers], left_out_s=0.0)
    for server in servers:
        peers.leave_out(server.url, "a while ago")
    WeightStore.over(store).pull()
    assert store.bytes_read == 0


def test_one_host_alone_reads_the_store_without_a_detour(weights, state, serving):
    server = serving(weights.objects)
    store, peers = reader(weights, [server.url])
    assert equal(WeightStore.over(store).pull(), state)
    assert (peers.urls, server.served, store.bytes_read) == ((), 0, stored_bytes(weights))


def test_a_reader_without_the_runs_token_gets_nothing_and_reads_the_store(weights, state, serving, caplog):
    servers = [serving(weights.objects), serving(weights.objects)]
    store, _ = reader(weights, [server.url for server in servers], token="another run's")
    assert equal(WeightStore.over(store).pull(), state)
    assert [server.cache.downloaded for server in servers] == [0, 0]
    assert store.bytes_read == stored_bytes(weights)
    assert TOKEN not in caplog.text and "another run's" not in caplog.text


def get(server: ChunkServer, path: str, **headers: str) -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection(*urlsplit(server.url).netloc.split(":"), timeout=20)
    try:
        connection.putrequest("GET", path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read(), response.getheader("Content-Range", "")
    finally:
        connection.close()


def test_the_server_says_what_was_asked_for_only_to_those_who_may_ask(weights, serving):
    server = serving(weights.objects)
    path = "/" + data_paths(weights, 0)[0]
    whole = weights.objects.read(path[1:])
    known = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=10-19"}
    assert get(server, path, **known) == (206, whole[10:20], f"bytes 10-19/{len(whole)}")
    assert get(server, path, **{**known, "Range": "bytes=10-99999999"})[1] == whole[10:]
    assert get(server, path, **{**known, "Range": f"bytes={len(whole)}-{len(whole) + 5}"}) == (416, b"", f"bytes */{len(whole)}")
    for said in ("", f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer t\xf6ken"):
        assert get(server, path, **{**known, "Authorization": said})[:2] == (401, b"")
    for broken in ("", "bytes=-5", "bytes=5-", "bytes=7-3", "bytes=0-3,5-6", "lines=0-3"):
        assert get(server, path, **{**known, "Range": broken})[:2] == (400, b"")
    assert get(server, path + "0000", **known)[:2] == (404, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/" + layout.commit_path(V0), "/data", "/data/", "/data/../" + layout.commit_path(V0), "/data/%2e%2e/commits",
        "//" + layout.commit_path(V0), "data/../../x",
        "/data/x?y", "/tags/x", "/", "http://127.0.0.1/data/x", "/data/./x", "/dataset/x",
    ],
)  # fmt: skip
def test_only_plain_paths_under_data_are_served(weights, serving, path):
    server = serving(weights.objects)
    status, body, _ = get(server, path, Authorization=f"Bearer {TOKEN}", Range="bytes=0-9")
    assert status in {400, 403} and body == b""
    assert server.cache.downloaded == 0


def test_a_link_out_of_the_store_is_not_followed(weights, serving, tmp_path):
    (tmp_path / "secret").write_text("nobody's business")
    (Path(weights.url) / "data" / "link").symlink_to(tmp_path / "secret")
    status, body, _ = get(serving(weights.objects), "/data/link", Authorization=f"Bearer {TOKEN}", Range="bytes=0-9")
    assert (status, body) == (503, b"")


def test_a_server_needs_a_token(weights):
    cache = ChunkCache(weights.objects)
    with pytest.raises(ValueError, match="token"):
        ChunkServer(cache, "", "127.0.0.1")
    cache.close()


def test_more_connections_than_allowed_are_turned_away_and_the_rest_go_on(weights, serving):
    server = serving(weights.objects, connections=2)
    path = "/" + data_paths(weights, 0)[0]
    held = [http.client.HTTPConnection(*urlsplit(server.url).netloc.split(":"), timeout=20) for _ in range(2)]
    for connection in held:
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}", "Range": "bytes=0-9"})
        assert len(connection.getresponse().read()) == 10
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        get(server, path, Authorization=f"Bearer {TOKEN}", Range="bytes=0-9")
    held[0].request("GET", path, headers={"Authorization": f"Bearer {TOKEN}", "Range": "bytes=0-9"})
    assert held[0].getresponse().status == 206
    for connection in held:
        connection.close()


def test_a_connection_that_the_server_ended_meanwhile_is_no_failure(weights, serving):
    servers = [serving(weights.objects), serving(weights.objects)]
    store, peers = reader(weights, [server.url for server in servers])
    WeightStore.over(store).pull()
    for server in servers:
        server._server.end_connections()
        assert server._server.wait_until_idle(20)
    WeightStore.over(store).pull()
    assert (peers.left_out, store.bytes_read) == (set(), 0)


def test_closing_ends_connections_and_threads_and_frees_port_and_memory(weights, caplog):
    before = set(threading.enumerate())
    server = ChunkServer(ChunkCache(weights.objects), TOKEN, "127.0.0.1")
    other = ChunkServer(ChunkCache(weights.objects), TOKEN, "127.0.0.1")
    store, _ = reader(weights, [server.url, other.url])
    WeightStore.over(store).pull()
    assert server.cache.kept_bytes + other.cache.kept_bytes == stored_bytes(weights)
    for one in (server, other):
        one.close()
        assert one.cache.kept_bytes == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", urlsplit(one.url).port), 5)
    assert "has not ended" not in caplog.text, "open connections were ended, not waited for"
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert set(threading.enumerate()) <= before


def test_a_peer_store_stays_one_in_its_children_and_travels_as_the_store_itself(weights, serving):
    servers = [serving(weights.objects), serving(weights.objects)]
    store, _ = reader(weights, [server.url for server in servers])
    path = data_paths(weights, 0)[0]
    folder, name = path.rsplit("/", 1)
    first, rest = folder.split("/", 1)
    buffer = np.empty(50, dtype=np.uint8)
    assert store.child(first).child(rest).read_into(name, buffer, 3) == len(weights.objects.read(path))
    assert buffer.tobytes() == weights.objects.read(path)[3:53]
    assert (store.bytes_read, sum(server.served for server in servers)) == (0, 50)
    travelled = pickle.loads(pickle.dumps(store))  # noqa: S301
    assert type(travelled) is ObjectStore and travelled.url == store.url


class GatedStore(ObjectStore):
    """Counts reads, each of which waits for `gate`."""

    reads = 0
    gate: threading.Event

    def read(self, path: str) -> bytes:
        self.reads += 1
        assert self.gate.wait(30)
        return super().read(path)


@pytest.fixture
def gated(weights: WeightStore) -> GatedStore:
    store = GatedStore(weights.url)
    store.gate = threading.Event()
    return store


def test_all_who_ask_at_once_wait_for_one_download(gated, weights):
    cache = ChunkCache(gated)
    path = data_paths(weights, 0)[0]
    with pytest.raises(TimeoutError):
        cache.get(path, 0.01)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(cache.get, path, 30) for _ in range(8)]
        gated.gate.set()
        assert {one.result() for one in asked} == {weights.objects.read(path)}
    assert (gated.reads, cache.downloaded) == (1, len(weights.objects.read(path)))
    cache.close()


def test_what_failed_is_tried_anew_by_the_next_to_ask(gated, weights):
    gated.gate.set()
    cache = ChunkCache(gated)
    for _ in range(2):
        with pytest.raises(ObjectMissing):
            cache.get("data/none", 30)
    assert (gated.reads, cache.kept_bytes) == (2, 0)
    cache.close()


def test_the_cache_keeps_what_was_used_last_up_to_its_limit(gated, weights):
    gated.gate.set()
    paths = data_paths(weights, 0)[:4]
    size = len(weights.objects.read(paths[0]))
    cache = ChunkCache(gated, limit=2 * size)
    for path in (paths[0], paths[1], paths[0], paths[2]):
        cache.get(path, 30)
        assert cache.kept_bytes <= 2 * size
    assert gated.reads == 3
    cache.get(paths[0], 30)
    assert gated.reads == 3, "0 was used after 1"
    cache.get(paths[1], 30)
    assert gated.reads == 4
    cache.close()


def test_an_object_beyond_the_limit_is_given_and_not_kept(weights):
    path = data_paths(weights, 0)[0]
    cache = ChunkCache(weights.objects, limit=10)
    assert cache.get(path, 30) == weights.objects.read(path)
    assert cache.kept_bytes == 0
    cache.close()


def test_only_the_retained_stays(weights):
    path = data_paths(weights, 0)[0]
    cache = ChunkCache(weights.objects)
    cache.get(path, 30)
    cache.retain([layout.data_prefix(V0, "")])
    assert cache.kept_bytes == len(weights.objects.read(path))
    cache.retain([layout.data_prefix(Version(0, 1), "")])
    assert cache.kept_bytes == 0
    cache.close()


def test_closing_the_cache_ends_what_waits_and_what_asks_later(gated, weights):
    cache = ChunkCache(gated)
    paths = data_paths(weights, 0)[:3]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(cache.get, path, 30) for path in paths]  # two are downloaded at once, so the third has not begun
        while len(cache._coming) < 3:
            asked[0].exception(0.01) if asked[0].done() else threading.Event().wait(0.01)
        closing = pool.submit(cache.close)
        with pytest.raises(CacheClosed):
            asked[2].result(30)
        gated.gate.set()
        closing.result(30)
    with pytest.raises(CacheClosed):
        cache.get(paths[0], 30)
    assert cache.kept_bytes == 0


def test_requests_are_not_logged_above_debug(weights, serving, caplog):
    caplog.set_level(logging.INFO)
    get(serving(weights.objects), "/" + data_paths(weights, 0)[0], Authorization=f"Bearer {TOKEN}", Range="bytes=0-9")
    assert caplog.records == []
