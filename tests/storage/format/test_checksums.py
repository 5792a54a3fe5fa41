from __future__ import annotations

import itertools

import google_crc32c
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.format.checksums import block_sums, combined, crc32c


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=300), block=st.integers(1, 70), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_block_sums_and_what_they_combine_to_are_those_of_the_bytes_however_they_are_cut(data, block, cuts):
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    buffers = [np.frombuffer(data[a:b], dtype=np.uint8) for a, b in itertools.pairwise(ends)]
    sums = block_sums(buffers, block)
    assert sums == [google_crc32c.value(data[at : at + block]) for at in range(0, len(data), block)]
    assert combined(sums, block, len(data)) == google_crc32c.value(data) == crc32c(buffers)
