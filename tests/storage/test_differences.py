"""What is said of two versions' difference, against numbers worked out by hand and against plain torch."""

from __future__ import annotations

import math
import uuid

import pytest
import torch

from storage import differences as module
from storage.differences import TensorDifference, differences, summary
from storage.errors import VersionMissing
from storage.version import Version
from storage.weights import WeightStore

ONE, TWO = Version(0, 0), Version(0, 1)


@pytest.fixture
def store() -> WeightStore:
    return WeightStore(f"memory://{uuid.uuid4().hex}")


def compared(store: WeightStore, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, TensorDifference]:
    store.publish(before, version=ONE).result()
    store.publish(after, version=TWO).result()
    return {d.name: d for d in differences((store, ONE), (store, TWO))}


def test_what_came_went_or_took_another_form_is_named_with_both_forms(store: WeightStore) -> None:
    found = compared(
        store,
        {"gone": torch.ones(2), "shape": torch.ones(2, 3), "type": torch.ones(4), "kept": torch.ones(1)},
        {"new": torch.ones(5), "shape": torch.ones(3, 2), "type": torch.ones(4, dtype=torch.bfloat16), "kept": torch.ones(1)},
    )
    assert {name: d.kind for name, d in found.items()} == {
        "gone": "removed", "new": "added", "shape": "reshaped", "type": "retyped", "kept": "same"
    }  # fmt: skip
    assert (found["gone"].before, found["gone"].after) == (("float32", (2,)), None)
    assert (found["new"].before, found["new"].after) == (None, ("float32", (5,)))
    assert (found["shape"].before, found["shape"].after) == (("float32", (2, 3)), ("float32", (3, 2)))
    assert (found["type"].before, found["type"].after) == (("float32", (4,)), ("bfloat16", (4,)))


def test_the_measures_are_those_of_their_definition(store: WeightStore) -> None:
    found = compared(store, {"w": torch.tensor([[3.0, 0.0], [4.0, 1.0]])}, {"w": torch.tensor([[3.0, -0.5], [6.0, 1.0]])})["w"]
    assert (found.kind, found.values, found.changed, found.changed_share, found.max_abs) == ("changed", 4, 2, 0.5, 2.0)
    assert found.relative_l2 == pytest.approx(math.sqrt(0.25 + 4) / math.sqrt(9 + 16 + 1), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.complex64, torch.float64])
def test_every_type_is_measured_as_plain_torch_measures_it(store: WeightStore, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE", 7)
    generator = torch.Generator().manual_seed(0)
    a = (torch.rand(5, 9, generator=generator) * 50 + 1).to(dtype)
    b = torch.where(
        torch.rand(5, 9, generator=generator) < 0.4, (torch.rand(5, 9, generator=generator) * 50 + 1).to(dtype).to(torch.complex128).real.to(dtype), a
    )
    found = compared(store, {"w": a}, {"w": b})["w"]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    change = (b.to(wide) - a.to(wide)).abs()
    assert found.changed == int((change > 0).sum()) > 0
    assert found.max_abs == float(change.max())
    assert found.relative_l2 == pytest.approx(float(change.norm() / a.to(wide).norm()), rel=1e-12)


def test_nan_that_stayed_is_no_change_and_one_that_came_is_told(store: WeightStore) -> None:
    nan = float("nan")
    found = compared(
        store, {"stays": torch.tensor([nan, 1.0]), "comes": torch.tensor([1.0])}, {"stays": torch.tensor([nan, 1.0]), "comes": torch.tensor([nan])}
    )
    assert (found["stays"].kind, found["stays"].changed) == ("same", 0)
    assert found["comes"].changed == 1 and math.isnan(found["comes"].max_abs) and math.isnan(found["comes"].relative_l2)
    assert math.isnan(summary(found.values()).max_abs)


def test_empty_scalar_and_tied_tensors_are_compared_too(store: WeightStore) -> None:
    shared = torch.ones(3)
    before = {"empty": torch.ones(0, 4), "scalar": torch.tensor(2.0), "a": shared, "b": shared}
    found = compared(store, before, {"empty": torch.ones(0, 4), "scalar": torch.tensor(3.0), "a": torch.ones(3), "b": torch.zeros(3)})
    assert {name: d.kind for name, d in found.items()} == {"empty": "same", "scalar": "changed", "a": "same", "b": "changed"}
    assert found["scalar"].relative_l2 == 0.5 and found["b"].relative_l2 == 1.0


def test_the_summary_is_of_all_values_that_can_be_compared(store: WeightStore) -> None:
    found = compared(
        store, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": torch.ones(2)}, {"a": torch.tensor([3.0]), "b": torch.tensor([5.0])}
    )
    whole = summary(found.values())
    assert (whole.values, whole.changed, whole.max_abs, whole.relative_l2) == (2, 1, 1.0, pytest.approx(0.2))


def test_tensors_are_read_a_bounded_batch_at_a_time_and_progress_ends_at_the_whole(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    state = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    store.publish(state, version=ONE).result()
    asked: list[int] = []
    pull = store.pull

    def counted(version: Version, names: list[str]) -> dict[str, torch.Tensor]:
        asked.append(len(names))
        return pull(version, names=names)

    monkeypatch.setattr(store, "pull", counted)
    heard: list[tuple[int, int]] = []
    assert all(d.kind == "same" for d in differences((store, ONE), (store, ONE), lambda *told: heard.append(told)))
    assert asked == [2, 2, 2, 2, 1, 1]
    assert heard == [(80, 200), (160, 200), (200, 200)]


def test_two_stores_can_be_compared_and_a_missing_version_is_told(store: WeightStore) -> None:
    other = WeightStore(f"memory://{uuid.uuid4().hex}")
    store.publish({"w": torch.ones(2)}, version=ONE).result()
    other.publish({"w": torch.ones(2)}, version=TWO).result()
    assert [d.kind for d in differences((store, ONE), (other, TWO))] == ["same"]
    with pytest.raises(VersionMissing):
        list(differences((store, ONE), (other, ONE)))
