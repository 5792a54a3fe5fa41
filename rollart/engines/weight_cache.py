"""One download of a version a host: folders in shared memory that all engines of a host load from. Talks to no engine."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rollart.engines import weight_file
from rollart.engines.adapter_folder import holds_adapter, write_adapter
from rollart.engines.host_chunks import HostChunks
from rollart.engines.locks import exclusive, shared, try_exclusive, unlock
from storage.errors import Damaged, StoreError, VersionMissing
from storage.format import layout
from storage.format.commit import Commit
from storage.models.adapters import BASE, Adapter, Whole, base_of, merge
from storage.peers.choice import Peers
from storage.peers.store import PeerStore
from storage.version import Version
from storage.weights import WeightStore

__all__ = ["SHARED_MEMORY", "CacheStats", "WeightCache", "shared_memory"]

log = logging.getLogger(__name__)

SHARED_MEMORY = "ROLLART_SHARED_MEMORY"
"""Environment variable with the folder that stands for a host: processes with the same one share their downloads."""

LEASE_S = 900.0
"""How long a lease on a version that is being read lasts if its holder dies: longer than a download takes."""

_PREFIX = "rollart-weights-"
_FILE = "model.safetensors"
_BASE = "base-"
_ADAPTER = "adapter"


def shared_memory() -> Path:
    """The folder in ROLLART_SHARED_MEMORY; without it /dev/shm where there is one, since weights there are read at memory speed;
    else the folder for temporary files."""
    if SHARED_MEMORY in os.environ:
        return Path(os.environ[SHARED_MEMORY])
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Bytes of versions' data that this process has read: `store` from the store, for itself and as a server for all hosts; `peers`
    from each host's server, by URL, its own host's among them. `served` are those that its server has sent."""

    store: int
    peers: dict[str, int]
    served: int


class WeightCache:
    """The versions of one store on this host, one folder each; processes share them by locks that die with their holders.

    `fetch` keeps a folder from being removed until the next `fetch` or `close`. Folders that no living process holds (their
    owners were killed) go when any cache opens. With `alone` versions that are adapters are left so, for engines that hold the
    base. With the `token` of a run, whose hosts can reach this one at `address`, hosts read from each other first and from the store
    last. Methods block: call them in a thread.
    """

    def __init__(
        self, store: WeightStore, parent: Path | None = None, *, alone: bool = False, token: str | None = None, address: str = "127.0.0.1"
    ) -> None:
        self._alone = alone
        self._parent = shared_memory() if parent is None else parent
        digest = hashlib.sha256(store.url.encode()).hexdigest()[:12]
        self.folder = self._parent / f"{_PREFIX}{os.getuid()}-{digest}"
        _sweep(self._parent, self.folder)
        self._life: int | None = _enter(self.folder)
        self._held: tuple[Path, int] | None = None
        self._peers: Peers | None = None
        self._chunks: HostChunks | None = None
        self._chains: list[list[Version]] = []
        if token is not None:
            self._chunks = HostChunks(store.objects, self.folder, token, address)
            self._peers = Peers(token)
            store = WeightStore.over(PeerStore.over(store.objects, self._peers))
        self._store = store
        self._said = self.stats

    @property
    def stats(self) -> CacheStats:
        """What was read so far. All zero without a token: then nobody counts."""
        objects = self._store.objects
        if self._peers is None or self._chunks is None or not isinstance(objects, PeerStore):
            return CacheStats(0, {}, 0)
        return CacheStats(objects.bytes_read + self._chunks.downloaded, self._peers.read, self._chunks.served)

    def chunk_server(self) -> str | None:
        """The URL of this host's chunk server, which some process of the host runs; None without a token."""
        return None if self._chunks is None else self._chunks.url()

    def fetch(self, version: Version, peers: Sequence[str] = ()) -> Path:
        """The folder with `model.safetensors` of `version`, downloaded unless another process of the host has done so. Of a version that
        is stored as changes, only those since the last one that this host still has are. Of adapters the base is downloaded once, and each
        version's own matrices are added into a copy of it; or, where they are left alone, the folder is as `adapter_folder` has it.

        `peers` are the chunk servers of all hosts, by URL. Raises what the store raises, VersionMissing among it, and OSError
        if there is no room. Removes the versions that nobody on this host holds any longer.
        """
        folder = self.folder / f"v{version}"
        if self._held is not None and self._held[0] == folder:
            return self._loaded_from(folder)
        if self._peers is not None:
            self._peers.use(peers)
        # Held before looked at: from here on nobody removes the folder, whether it is there already or not.
        lock = shared(folder.with_suffix(".lock"))
        try:
            download = exclusive(self.folder / "download")
            try:
                if not self._there(folder):
                    self._download(version, folder)
            finally:
                unlock(download)
        except BaseException:
            unlock(lock)
            raise
        before, self._held = self._held, (folder, lock)
        if before is not None:
            unlock(before[1])
        self._remove_unheld()
        self._retain(version)
        return self._loaded_from(folder)

    def close(self) -> None:
        """Lets go of everything; the last process of the host to do so removes the folder."""
        if self._held is not None:
            unlock(self._held[1])
            self._held = None
        if self._life is not None:
            self._remove_unheld()
            _leave(self.folder, self._life)
            self._life = None
        # Last, since the server ends with this process anyhow, while the folder would stay.
        if self._peers is not None:
            self._peers.close()
        if self._chunks is not None:
            self._chunks.close()

    def _there(self, folder: Path) -> bool:
        return (folder / _FILE).exists() or (self._alone and holds_adapter(folder / _ADAPTER))

    def _loaded_from(self, folder: Path) -> Path:
        """Where in a version's folder its engines load from: caches that merge and ones that don't may share it."""
        return folder / _ADAPTER if self._alone and holds_adapter(folder / _ADAPTER) else folder

    def _download(self, version: Version, folder: Path) -> None:
        """Puts the file there whole: it is filled aside, then moved. So is an adapter's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".aside-*"):  # of a process that was killed here: nobody else is, under the lock for downloads
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        aside, target = folder / f".aside-{os.getpid()}", folder / _FILE
        with self._leased(version):
            whole = Whole(self._store, version)
            commit = whole.commit
            chain = [version] if commit.base is None else self._store.chain(version)
            try:
                if whole.adapter is not None and self._alone:
                    write_adapter(aside, whole.adapter, self._store.pull(version), self._base(whole.layout, whole.adapter))
                    target = folder / _ADAPTER
                elif whole.adapter is not None:
                    shutil.copyfile(self._base(whole.layout, whole.adapter), aside)
                    merge(weight_file.mapped(aside, whole.layout), self._store.pull(version), whole.adapter)
                elif not self._updated(commit, chain[1:], aside):
                    weight_file.create(aside, commit)
                    out = weight_file.mapped(aside, commit)
                    self._store.pull(version, names=list(out), out=out)
                aside.replace(target)
            finally:
                shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)
        # Since the last line of the log: what this host's server has read for others meanwhile is in one of them.
        before, self._said = self._said, self.stats
        peers = sum(self._said.peers.values()) - sum(before.peers.values())
        log.info("version %s came to this host: %d bytes from the store, %d from peers", version, self._said.store - before.store, peers)

    def _base(self, commit: Commit, adapter: Adapter) -> Path:
        """The file of an adapter's base, downloaded unless this host has it; then it stays as long as anybody here does, or until another
        base is asked for. Under the lock for downloads."""
        path = self.folder / f"{_BASE}{adapter.base}"
        for other in set(self.folder.glob(f"{_BASE}*")) - {path}:
            other.unlink()
        if not path.exists():
            aside = path.with_suffix(".aside")
            weight_file.create(aside, commit)
            out = weight_file.mapped(aside, commit)
            base_of(self._store, adapter.base).pull(BASE, names=list(out), out=out)
            aside.replace(path)
        return path

    def _retain(self, version: Version) -> None:
        """Has the host's chunk server, if this process runs it, keep the last two versions: other hosts may still be at the one before."""
        if self._chunks is None or not self._chunks.runs_here:
            return
        try:
            chain = self._store.chain(version)
        except StoreError as error:
            log.info("chunks of versions before %s stay until others take their room: %s", version, error)
            return
        self._chains = [*self._chains[-1:], chain]
        self._chunks.retain(layout.data_prefix(needed, "") for versions in self._chains for needed in versions)

    def _updated(self, commit: Commit, bases: Sequence[Version], aside: Path) -> bool:
        """Makes the file of the newest of `bases` that this host has, and the changes since; whether there is one that this works with."""
        for base in bases:
            with self._borrowed(base) as source:
                if source is None or not weight_file.copy_if_alike(source, aside, commit):
                    continue
            try:
                self._store.pull(commit.version, base=base, out=weight_file.mapped(aside, commit))
            except Damaged as error:
                log.warning("version %s is read whole, not as changes of this host's copy of %s: %s", commit.version, base, error)
                aside.unlink()
                return False
            return True
        return False

    @contextmanager
    def _borrowed(self, version: Version) -> Iterator[Path | None]:
        """The file of a version, if this host has it, which stays for as long as this lasts."""
        folder = self.folder / f"v{version}"
        if not (folder / _FILE).exists():
            yield None
            return
        lock = shared(folder.with_suffix(".lock"))
        try:
            yield folder / _FILE if (folder / _FILE).exists() else None
        finally:
            unlock(lock)

    def _leased(self, version: Version) -> AbstractContextManager[object]:
        """Keeps the version in the store for as long as it is read, if this host may write there; without, the store's grace has to do."""
        try:
            return self._store.lease(version, LEASE_S, f"{socket.gethostname()} pid {os.getpid()}")
        except VersionMissing:
            raise
        except StoreError as error:
            log.info("version %s is read without a lease: %s", version, error)
            return nullcontext()

    def _remove_unheld(self) -> None:
        for path in self.folder.glob("v*.lock"):
            if self._held is not None and path == self._held[0].with_suffix(".lock"):
                continue
            lock = try_exclusive(path)
            if lock is not None:
                # The lock's file stays: whoever opened it before would else hold a lock that nobody sees.
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                unlock(lock)


def _enter(folder: Path) -> int:
    """Takes part in `folder`: a shared lock for as long as this process lives."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "living"
        try:
            lock = shared(path)
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:
            continue  # the last one out removed the folder in between
        unlock(lock)


def _leave(folder: Path, lock: int) -> None:
    unlock(lock)
    _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    path = folder / "living"
    if not path.exists():
        return
    lock = try_exclusive(path)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        unlock(lock)


def _sweep(parent: Path, own: Path) -> None:
    """Removes what killed processes of this user left."""
    for folder in parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        if folder != own:
            _remove_if_dead(folder)
