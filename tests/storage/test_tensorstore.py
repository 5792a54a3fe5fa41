"""Another implementation of Zarr reads what is stored; `make stores` installs it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage.format import layout
from storage.version import Version
from storage.weights import WeightStore

tensorstore = pytest.importorskip("tensorstore", reason="`make stores` installs tensorstore")


def test_tensorstore_opens_the_arrays_with_equal_values(place, tmp_path):
    weights = WeightStore(*place)
    state = {"w": torch.randn(300, 500), "zeros": torch.zeros(100_000), "h": torch.randn(50).bfloat16(), "n": torch.arange(5)}
    weights.publish(state, step=0).result(60)
    prefix = layout.data_prefix(Version(0, 0), weights.commit(Version(0, 0)).attempt)
    for path in weights.objects.list(prefix):  # its own client of the store would want its own credentials
        file = tmp_path / "copy" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(weights.objects.read(path))

    def values(array: str) -> np.ndarray:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/copy/{prefix}/{array}/"}}
        return tensorstore.open(spec).result().read().result()

    assert np.array_equal(values("float32"), torch.cat([state["w"].reshape(-1), state["zeros"]]).numpy())
    assert np.array_equal(values("bfloat16"), state["h"].view(torch.uint16).numpy())
    assert np.array_equal(values("int64"), state["n"].numpy())
