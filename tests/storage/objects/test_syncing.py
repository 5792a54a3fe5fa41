"""What is written together on a local disk: the order of syncs, and what a failure of the disk leaves."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from storage.objects.local import LocalObjects
from storage.objects.spans import Content


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were synced, in order."""
    found: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_each_folder_is_synced_once_and_at_the_end(tmp_path: Path, synced: list[str]) -> None:
    objects = LocalObjects(str(tmp_path / "store"), durable=True)
    with objects.together():
        for number in range(4):
            objects.write(f"data/one/{number}", Content.of(b"x" * 10))
        assert synced == []
    assert sorted(synced) == [str(folder) for folder in (tmp_path, tmp_path / "store", tmp_path / "store/data", tmp_path / "store/data/one")]
    assert (tmp_path / "store/data/one/3").read_bytes() == b"x" * 10


def test_a_disk_that_fails_is_told_and_the_folders_that_were_made_are_recorded_all_the_same(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = os.fsync

    def full(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOSPC, "no space left on device")
        noted(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    objects = LocalObjects(str(tmp_path / "store"), durable=True)
    with pytest.raises(OSError, match="no space left"), objects.together():
        objects.write("data/one/0", Content.of(b"x"))
    assert str(tmp_path / "store/data") in synced and str(tmp_path / "store") in synced
    assert not (tmp_path / "store/data/one/0").exists()
    with pytest.raises(ValueError, match="the caller's own"), objects.together():
        objects.write("data/two/0", Content.of(b"x"))
        raise ValueError("the caller's own")
