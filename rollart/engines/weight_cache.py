"""One download of a version a host: folders in shared memory that all engines of a host load from. Talks to no engine."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from storage.version import Version
from storage.weights import WeightStore

__all__ = ["WeightCache", "shared_memory"]

log = logging.getLogger(__name__)

_PREFIX = "rollart-weights-"


def shared_memory() -> Path:
    """/dev/shm where there is one, since weights there are read at memory speed; else the folder for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class WeightCache:
    """The versions of one store on this host, one folder each; processes share them by locks that die with their holders.

    `fetch` keeps a folder from being removed until the next `fetch` or `close`. Folders that no living process holds (their
    owners were killed) go when any cache opens. Methods block: call them in a thread.
    """

    def __init__(self, store: WeightStore, parent: Path | None = None) -> None:
        self._store = store
        self._parent = shared_memory() if parent is None else parent
        digest = hashlib.sha256(store.url.encode()).hexdigest()[:12]
        self.folder = self._parent / f"{_PREFIX}{os.getuid()}-{digest}"
        _sweep(self._parent, self.folder)
        self._life: int | None = _enter(self.folder)
        self._held: tuple[Path, int] | None = None

    def fetch(self, version: Version) -> Path:
        """The folder with `model.safetensors` of `version`, downloaded unless another process of the host has done so.

        Raises what the store raises, VersionMissing among it. Removes the versions that nobody on this host holds any longer.
        """
        folder = self.folder / f"v{version}"
        if self._held is not None and self._held[0] == folder:
            return folder
        # Held before looked at: from here on nobody removes the folder, whether it is there already or not.
        lock = _locked(folder.with_suffix(".lock"), fcntl.LOCK_SH)
        try:
            download = _locked(self.folder / "download", fcntl.LOCK_EX)
            try:
                if not (folder / "model.safetensors").exists():
                    _write(folder, self._store.pull(version))
            finally:
                os.close(download)
        except BaseException:
            os.close(lock)
            raise
        before, self._held = self._held, (folder, lock)
        if before is not None:
            os.close(before[1])
        self._remove_unheld()
        return folder

    def close(self) -> None:
        """Lets go of everything; the last process of the host to do so removes the folder."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = None
        if self._life is not None:
            self._remove_unheld()
            _leave(self.folder, self._life)
            self._life = None

    def _remove_unheld(self) -> None:
        for path in self.folder.glob("v*.lock"):
            if self._held is not None and path == self._held[0].with_suffix(".lock"):
                continue
            lock = _try_lock(path)
            if lock is not None:
                # The lock's file stays: whoever opened it before would else hold a lock that nobody sees.
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                os.close(lock)


def _write(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Writes `state` as model.safetensors, aside first; tied tensors once, under their first name."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape))
        if identity not in seen or tensor.numel() == 0:
            seen.add(identity)
            kept[name] = tensor.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".aside-{os.getpid()}"
    try:
        save_file(kept, aside, metadata={"format": "pt"})
        os.replace(aside, folder / "model.safetensors")
    finally:
        aside.unlink(missing_ok=True)


def _locked(path: Path, kind: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _try_lock(path: Path) -> int | None:
    """The exclusive lock of `path`, or None if somebody holds it."""
    try:
        return _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _enter(folder: Path) -> int:
    """Takes part in `folder`: a shared lock for as long as this process lives."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "living"
        try:
            lock = _locked(path, fcntl.LOCK_SH)
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:
            continue  # the last one out removed the folder in between
        os.close(lock)


def _leave(folder: Path, lock: int) -> None:
    os.close(lock)
    _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    path = folder / "living"
    if not path.exists():
        return
    lock = _try_lock(path)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path, own: Path) -> None:
    """Removes what killed processes of this user left."""
    for folder in parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        if folder != own:
            _remove_if_dead(folder)
