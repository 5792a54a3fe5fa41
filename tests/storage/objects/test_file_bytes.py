from __future__ import annotations

import mmap
import os
import sys

import numpy as np
import pytest

from storage.objects import file_bytes
from storage.objects.file_bytes import fill, put
from storage.objects.spans import Content

SIZE = (9 << 20) + 1234
"""Two windows and a part of a third."""


@pytest.fixture
def content():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def descriptor(tmp_path, content):
    (tmp_path / "x").write_bytes(content.tobytes())
    opened = os.open(tmp_path / "x", os.O_RDONLY)
    yield opened
    os.close(opened)


def buffers(*sizes: int) -> list[np.ndarray]:
    return [np.full(size, 7, dtype=np.uint8) for size in sizes]


@pytest.mark.parametrize("start", [0, 1, 4096, (4 << 20) - 3, 5_000_000])
def test_buffers_are_filled_from_any_byte_of_a_file(descriptor, content, start):
    room = buffers(1, 0, 4095, 3 << 20, 77, 1 << 20, 5)
    fill(descriptor, room, start)
    assert np.array_equal(np.concatenate(room), content[start : start + sum(map(len, room))])


@pytest.mark.parametrize("size", [2 << 20, 1000])
def test_what_is_past_the_end_of_a_file_stays_as_it_was(descriptor, content, size):
    room = buffers(size // 2, size)
    fill(descriptor, room, SIZE - size)
    found = np.concatenate(room)
    assert np.array_equal(found[:size], content[-size:])
    assert set(found[size:].tolist()) == {7}
    fill(descriptor, room, SIZE + 5)
    assert np.array_equal(np.concatenate(room), found)


@pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux only")
@pytest.mark.parametrize("good", [0, 1])
def test_a_file_that_can_not_be_mapped_is_read(descriptor, content, monkeypatch, good):
    made = []

    def limited(*args, **more):
        made.append(args)
        if len(made) > good:
            raise OSError(19, "No such device")
        return mmap.mmap(*args, **more)

    monkeypatch.setattr(file_bytes, "mmap", type("Limited", (), {**vars(mmap), "mmap": staticmethod(limited)}))
    room = buffers(5 << 20, 3 << 20)
    fill(descriptor, room, 11)
    assert np.array_equal(np.concatenate(room), content[11 : 11 + (8 << 20)])
    assert len(made) == good + 1


def test_any_number_of_parts_is_written_in_order(tmp_path, monkeypatch):
    written = []
    writev = os.writev

    def short(descriptor, views):
        written.append(len(views))
        return writev(descriptor, views[:500] if len(written) % 2 else [views[0][:3]])

    monkeypatch.setattr(os, "writev", short)
    parts = [np.full(i % 7, i % 251, dtype=np.uint8) for i in range(3000)]
    descriptor = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    put(descriptor, Content.of(parts))
    os.close(descriptor)
    assert (tmp_path / "x").read_bytes() == np.concatenate(parts).tobytes()
    assert max(written) == 1024


def test_what_is_read_is_shown_once_in_order_and_in_place(tmp_path, monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    file = tmp_path / "file"
    file.write_bytes(data.tobytes())
    for mapped_from in (1, 1 << 40):
        monkeypatch.setattr(file_bytes, "_MAPPED_FROM", mapped_from)
        buffers = [np.zeros(count, dtype=np.uint8) for count in (5, 1 << 20, 0, (1 << 20) + 3)]
        shown: list[np.ndarray] = []
        with file.open("rb") as opened:
            fill(opened.fileno(), buffers, 7, shown.extend)
        assert np.array_equal(np.concatenate(shown), data[7 : 7 + 8 + (2 << 20)])
        assert all(any(np.shares_memory(part, buffer) for buffer in buffers) for part in shown if len(part))
