from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import zstd

from storage.format import codec
from storage.format.codec import ChangeRefused

WORDS = [1, 2, 4, 8]


def bits(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def changed(base: np.ndarray, word: int, share: float, seed: int = 1, by: int | None = None) -> np.ndarray:
    """`base` with a share of its words changed: to anything, or by `by` units."""
    generator = np.random.default_rng(seed)
    words = base.copy().view(f"<u{word}")
    at = np.flatnonzero(generator.random(len(words)) < share)
    words[at] = bits(len(at) * word, seed).view(words.dtype) if by is None else words[at] + words.dtype.type(by)
    return words.view(np.uint8)


def applied(base: np.ndarray, change: bytes, word: int) -> np.ndarray:
    result = base.copy()
    codec.apply(result, np.frombuffer(change, dtype=np.uint8), word)
    return result


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("share", [0.0001, 0.007, 0.1, 0.3, 0.45, 0.8, 1.0])
@pytest.mark.parametrize("by", [1, 2**8 - 1, None])
def test_a_change_gives_the_new_bytes_back(word, share, by):
    base = bits(1 << 18)
    new = changed(base, word, share, by=by)
    change = codec.encode(base, new, word)
    assert np.array_equal(applied(base, change, word), new)
    assert len(change) <= codec.largest(len(base))


def test_equal_bytes_have_an_empty_change():
    assert codec.encode(bits(4096), bits(4096), 2) == b""
    assert codec.encode(bits(0), bits(0), 2) == b""
    assert np.array_equal(applied(bits(4096), b"", 2), bits(4096))


def test_the_smallest_kind_is_chosen_by_how_much_has_changed():
    base = bits(1 << 18)
    kinds = {share: codec.encode(base, changed(base, 2, share, by=1), 2)[0] for share in (0.01, 0.9)}
    assert kinds == {0.01: 1, 0.9: 2}
    zeros = np.zeros(1 << 18, dtype=np.uint8)
    change = codec.encode(base, zeros, 2)
    assert change[0] == 3
    assert len(change) < 100


def test_a_step_of_one_unit_in_a_few_words_takes_about_a_byte_each_whatever_the_base():
    base = bits(1 << 20)
    for by in (1, 2**16 - 1):
        new = changed(base, 2, 0.007, by=by)
        count = np.count_nonzero(base.view("<u2") != new.view("<u2"))
        assert len(codec.encode(base, new, 2)) < 1.1 * count + 100


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("at", [[0], [254], [255], [256], [510], [511], [0, 256], [1, 1023], [1023]])
def test_gaps_around_the_escape_are_kept(word, at):
    base = bits(1024 * word)
    new = base.copy()
    new.view(f"<u{word}")[at] ^= 1
    assert np.array_equal(applied(base, codec.encode(base, new, word), word), new)


def test_special_floats_are_kept_bit_for_bit():
    patterns = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x8001], dtype="<u2")
    base = np.repeat(patterns, len(patterns)).view(np.uint8)
    new = np.tile(patterns, len(patterns)).view(np.uint8)
    assert np.array_equal(applied(base, codec.encode(base, new, 2), 2), new)


@settings(max_examples=200, deadline=None)
@given(
    word=st.sampled_from(WORDS),
    size=st.integers(0, 700),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
    by=st.one_of(st.none(), st.integers(1, 255)),
)
def test_any_bytes_come_back(word, size, share, seed, by):
    base = bits(size * word, seed)
    new = changed(base, word, share, seed + 1, by)
    change = codec.encode(base, new, word)
    assert np.array_equal(applied(base, change, word), new)
    assert bool(change) == (not np.array_equal(base, new))


def stream(data: bytes, how: int = 0, length: int | None = None) -> bytes:
    return struct.pack("<BI", how, len(data) if length is None else length) + data


def sparse(count: int, gaps: bytes, *planes: bytes, length: int | None = None) -> bytes:
    return b"\x01" + struct.pack("<II", count, len(gaps) if length is None else length) + stream(gaps) + b"".join(map(stream, planes))


BOMB = bytearray(zstd.compress(bytes(1 << 20), 1))
assert BOMB[4] >> 6 == 2
BOMB[6:10] = struct.pack("<I", 2**32 - 1)

REFUSED = {
    "unknown kind": b"\x00",
    "kind of later": b"\x09" + bytes(50),
    "nothing after the kind": b"\x01",
    "half a header": b"\x01\x00\x00",
    "more changes than values": sparse(101, bytes(101), bytes(101), bytes(101)),
    "huge counts": sparse(2**32 - 1, b"", b"", b"", length=2**32 - 1),
    "more gaps than fit": sparse(1, b"\xff\xff\xff\x00", b"\0", b"\0"),
    "fewer gaps than changes": sparse(3, b"\0\0", b"\0\0\0", b"\0\0\0"),
    "a gap that ends nowhere": sparse(1, b"\x00\xff", b"\0", b"\0"),
    "only an escape": sparse(0, b"\xff", b"", b""),
    "beyond the last value": sparse(1, b"\x64", b"\0", b"\0"),
    "beyond it by two gaps": sparse(2, b"\x32\x32", b"\0\0", b"\0\0"),
    "a plane too short": sparse(2, b"\0\0", b"\0\0", b"\0"),
    "a plane too few": sparse(1, b"\0", b"\0"),
    "a plane too many": sparse(1, b"\0", b"\0", b"\0", b"\0"),
    "bytes at the end": b"\x02" + stream(bytes(100)) * 2 + b"x",
    "a stream longer than all": b"\x02" + stream(bytes(100), length=2**32 - 1),
    "an unknown stream": b"\x02" + stream(bytes(100), how=2) * 2,
    "no zstandard": b"\x02" + stream(bytes(100), how=1) * 2,
    "an empty frame": b"\x02" + stream(b"", how=1) * 2,
    "a frame of another size": b"\x03" + stream(zstd.compress(bytes(99), 1), how=1) * 2,
    "a frame that says it is huge": b"\x03" + stream(bytes(BOMB), how=1) * 2,
    "a frame cut short": b"\x03" + stream(zstd.compress(bytes(100), 1)[:-1], how=1) * 2,
    "two frames": b"\x03" + stream(zstd.compress(bytes(100), 1) * 2, how=1) * 2,
    "a large frame after the right one": b"\x03" + stream(zstd.compress(bytes(100), 1) + bytes(BOMB), how=1) * 2,
}


@pytest.mark.parametrize("case", REFUSED)
def test_bytes_that_are_no_change_are_refused_and_change_nothing(case):
    base = bits(200)
    with pytest.raises(ChangeRefused):
        applied_to = base.copy()
        codec.apply(applied_to, np.frombuffer(REFUSED[case], dtype=np.uint8), 2)
    assert np.array_equal(applied_to, base)


def test_the_refused_cases_differ_from_valid_ones_in_what_they_say():
    for valid in (sparse(1, b"\x63", b"\x01", b"\0"), b"\x03" + stream(zstd.compress(bytes(100), 1), how=1) * 2, sparse(0, b"", b"", b"")):
        applied(bits(200), valid, 2)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), word=st.sampled_from(WORDS))
def test_spoilt_changes_are_refused_or_give_some_segment_and_never_crash(data, word):
    base = bits(512)
    share = data.draw(st.sampled_from([0.05, 0.4, 1.0]))
    change = bytearray(codec.encode(base, changed(base, word, share, by=3), word))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(change) - 1))
        change[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(1, len(change)))
    with contextlib.suppress(ChangeRefused):
        assert len(applied(base, bytes(change[:end]), word)) == len(base)
