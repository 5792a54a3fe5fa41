"""A store in Dask workers, threads, coroutines and forked processes: the right data, or after a fork an error at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from distributed import Client, LocalCluster, get_worker

from storage.errors import ForkedStore, StoreError
from storage.objects.store import ObjectStore
from storage.version import Version
from storage.weights import WeightStore

ZERO, ONE = Version(0, 0), Version(0, 1)
PATIENCE_S = 30


def state(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300,), float(number)), "b": torch.arange(7) + number}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


@pytest.fixture
def weights(place):
    store = WeightStore(*place)
    store.publish(state(0), version=ZERO).result(PATIENCE_S)
    return store


def test_sixteen_threads_share_one_store(weights):
    def work(number: int) -> dict[str, torch.Tensor]:
        weights.objects.write(f"notes/{number}", str(number).encode())
        assert weights.objects.read(f"notes/{number}") == str(number).encode()
        return weights.pull(ZERO)

    with ThreadPoolExecutor(16) as pool:
        for found in pool.map(work, range(32)):
            assert_same(found, state(0))
    assert len(weights.objects.list("notes")) == 32


async def test_blocking_calls_inside_a_running_loop_and_beside_it(weights):
    assert_same(weights.pull(), state(0))  # holds this loop up, and works
    weights.publish(state(1), version=ONE).result(PATIENCE_S)
    found = await asyncio.gather(*(asyncio.to_thread(weights.pull, version) for version in (ZERO, ONE, ZERO, ONE)))
    for one, number in zip(found, (0, 1, 0, 1), strict=True):
        assert_same(one, state(number))


def test_one_store_serves_several_loops_in_turn(weights):
    async def pull() -> dict[str, torch.Tensor]:
        return await asyncio.to_thread(weights.pull)

    for _ in range(2):
        assert_same(asyncio.run(pull()), state(0))
    assert_same(weights.pull(), state(0))


@pytest.fixture(scope="module")
def workers():
    """Two worker processes, spawned, as the system starts them."""
    with LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None) as cluster, Client(cluster) as client:
        yield client


def test_dask_workers_pull_and_publish_with_a_store_that_travels(workers, weights, place):
    if place[0].startswith("memory"):
        pytest.skip("the memory of one process")

    def pull(store: WeightStore) -> tuple[int, float]:
        return os.getpid(), float(store.pull()["a"].sum())

    def publish(store: WeightStore, number: int) -> str:
        return str(store.publish(state(number), version=Version(0, number)).result(PATIENCE_S))

    addresses = list(workers.scheduler_info()["workers"])
    found = [workers.submit(pull, weights, workers=[address], pure=False) for address in addresses]
    pids = {future.result(PATIENCE_S)[0] for future in found}
    assert {future.result()[1] for future in found} == {0.0}
    assert len(pids) == 2 and os.getpid() not in pids
    assert workers.submit(publish, weights, 1, pure=False).result(PATIENCE_S) == str(ONE)
    assert_same(weights.pull(), state(1))


def test_a_dask_actor_uses_a_store_from_its_coroutines(workers, weights, place):
    if place[0].startswith("memory"):
        pytest.skip("the memory of one process")

    class Puller:
        def __init__(self, store: WeightStore) -> None:
            self.store = store

        async def pull(self) -> float:
            assert get_worker() is not None
            blocking = self.store.pull()["b"].sum()
            return float(blocking + (await asyncio.to_thread(self.store.pull))["b"].sum())

    actor = workers.submit(Puller, weights, actor=True).result(PATIENCE_S)
    assert actor.pull().result(PATIENCE_S) == 2 * float(torch.arange(7).sum())


def in_fork(work):
    """What `work` returns in a forked process, or the name and text of the store's error; EOFError for another error."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(work())
        except StoreError as error:
            sender.send((type(error).__name__, str(error)))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    sender.close()
    try:
        assert receiver.poll(PATIENCE_S), "the forked process hangs"
        return receiver.recv()
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.objects.read("x"), lambda w: w.objects.write("x", b""), lambda w: w.objects.list(), lambda w: w.objects.create("x", b""),
        lambda w: w.objects.child("d").read("x"), lambda w: w.objects.check_writable(),
        lambda w: w.pull(), lambda w: w.newest(), lambda w: w.publish(state(1), version=ONE),
    ],
    ids=["read", "write", "list", "create", "child", "check", "pull", "newest", "publish"],
)  # fmt: skip
def test_a_store_from_before_a_fork_says_so_at_once(weights, use):
    name, text = in_fork(lambda: use(weights))
    assert name == ForkedStore.__name__
    assert "fork" in text and "open a new" in text
    assert_same(weights.pull(), state(0))  # the parent goes on


def test_a_store_opened_after_a_fork_works(weights, place):
    def work() -> object:
        store = WeightStore(*place)
        if store.newest() is None:
            store.publish(state(0), version=ZERO).result(PATIENCE_S)
        return float(store.pull()["b"].sum()), store.objects.create("from-the-child", b"")

    assert in_fork(work) == (float(torch.arange(7).sum()), True)


def test_a_store_that_is_pickled_after_a_fork_opens_anew(place):
    store = ObjectStore(*place)
    store.write("x", b"1")
    again = in_fork(lambda: pickle.loads(pickle.dumps(store)).read("x"))  # noqa: S301
    assert again == b"1"
