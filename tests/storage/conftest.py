"""The kinds of store that the same tests run on: a folder, fsspec's memory, and S3 as moto acts it.

With `--stores=real` they run on real servers instead, SeaweedFS for S3 and fake-gcs-server for GCS, and tests without a server don't.
Tests that are marked `many_requests` show the same on a folder and in memory in a tenth of the time, so that moto's turn at them is `slow`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from benchmarks import servers
from storage.objects.store import ObjectStore
from tests.storage.scripted import Killed

Place = tuple[str, dict[str, Any]]

KINDS = {"quick": ["local", "memory", "s3"], "real": ["s3", "gcs"]}
SERVED = {"place", "proxied", "s3", "gcs"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any("place" in marker.args[0] for marker in metafunc.definition.iter_markers("parametrize"))
    if "place" in metafunc.fixturenames and not chosen:
        stores = metafunc.config.getoption("--stores")
        late = {"s3"} if stores == "quick" and metafunc.definition.get_closest_marker("many_requests") else set()
        kinds = [pytest.param(kind, marks=pytest.mark.slow) if kind in late else kind for kind in KINDS[stores]]
        metafunc.parametrize("place", kinds, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--stores") == "real":
        served = [item for item in items if SERVED & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=[item for item in items if item not in served])
        items[:] = served


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Client options for a running S3 server with bucket `bucket`."""
    if request.config.getoption("--stores") == "real":
        with servers.seaweedfs() as options:
            yield options
        return
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "key": "test-key-id",
        "secret": "test-secret-value",
        "endpoint_url": f"http://{host}:{port}",
    }
    fsspec.filesystem("s3", **options).mkdir("bucket")
    yield options
    server.stop()


@pytest.fixture(scope="session")
def gcs() -> Iterator[dict[str, Any]]:
    """Client options for a running GCS server with bucket `bucket`."""
    with servers.fake_gcs() as options:
        yield options


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """URL and storage options of an empty store."""
    if request.param == "local":
        return str(tmp_path / "new" / "store"), {}
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}", {}
    protocol = {"s3": "s3", "gcs": "gs"}[request.param]
    return f"{protocol}://bucket/{uuid.uuid4().hex}", request.getfixturevalue(request.param)


@pytest.fixture
def objects(place: Place) -> ObjectStore:
    return ObjectStore(*place)


class DyingStore(ObjectStore):
    """An object store whose `left` more writes (creations included) succeed; the next one kills the process before it acts."""

    budget: list[int]

    @classmethod
    def over(cls, place: Place, left: int, durable: bool = False) -> DyingStore:
        store = cls(place[0], place[1], durable=durable)
        store.budget = [left]
        return store

    def child(self, prefix: str) -> DyingStore:
        child = super().child(prefix)
        assert isinstance(child, DyingStore)
        child.budget = self.budget
        return child

    def write(self, path: str, data: Any) -> None:
        self._spend()
        super().write(path, data)

    def create(self, path: str, data: Any) -> bool:
        self._spend()
        return super().create(path, data)

    def _spend(self) -> None:
        if self.budget[0] == 0:
            raise Killed
        self.budget[0] -= 1


@pytest.fixture
def dying(place: Place) -> Callable[[int], DyingStore]:
    return lambda left: DyingStore.over(place, left)


@pytest.fixture
def killed() -> type[BaseException]:
    return Killed
