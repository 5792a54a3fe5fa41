"""Versions that are low-rank adapters of a base: what they say of themselves, where their base is, and how the two become whole weights.

LoRA, Hu et al. 2021 (arXiv 2106.09685). The tensors of such a version are named as the peft library saves them. Its base is a version of
its own below the same store, in `bases/` under its digest: no collection looks there, so it stays, and it moves with the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import pydantic
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from storage.errors import Damaged, StoreError, UnknownTensor, VersionMissing, VersionTaken
from storage.format.commit import JSON, Commit
from storage.format.index import TensorEntry
from storage.keeping.verification import Damage, Verification
from storage.progress import Progress
from storage.refs import Reference
from storage.version import Version
from storage.weights import WeightStore

__all__ = [
    "ADAPTER", "BASE", "CONFIG_FILE", "PREFIX", "Adapter", "Whole", "adapter_of", "base_of", "bases", "digest_of", "merge", "merged_weight",
    "publish_base", "verify_with_bases",
]  # fmt: skip

ADAPTER = "adapter"
"""Where a version's metadata says that it is an adapter."""

CONFIG_FILE = "adapter_config.json"
"""peft's own file, among the files of an adapter's version."""

PREFIX = "base_model.model."
"""What peft puts before the names of the model's own modules."""

BASE = Version(0, 0)
"""The one version of a base's store."""

_BASES = "bases"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, config=pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class Adapter:
    """An adapter of `rank` on the layers `targets`, adding alpha / rank * B A to the weights of the base whose digest is `base`.

    `transposed` says that the layers store their weights as [in, out] (transformers' Conv1D; peft's `fan_in_fan_out`).
    """

    rank: pydantic.PositiveInt
    alpha: float
    targets: list[str]
    transposed: bool
    base: str

    @pydantic.field_validator("base")
    @classmethod
    def _is_digest(cls, base: str) -> str:
        if _DIGEST.fullmatch(base) is None:
            raise ValueError("a base is named by the 64 hexadecimal digits of its digest")
        return base

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def document(self) -> dict[str, JSON]:
        """What the metadata of a version with this adapter holds."""
        return {ADAPTER: asdict(self)}


def adapter_of(commit: Commit, url: str) -> Adapter | None:
    """What a version of the store at `url` says of the adapter that it is; None for whole weights. Damaged if that makes no sense."""
    said = commit.metadata.get(ADAPTER)
    if said is None:
        return None
    try:
        return pydantic.TypeAdapter(Adapter).validate_json(pydantic.TypeAdapter(JSON).dump_json(said))
    except ValueError as error:
        raise Damaged(what="what it says of its adapter", reason=f"is refused: {error}", url=url, version=commit.version) from error


def digest_of(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors, by name: their types, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        if value.numel():
            digest.update(value.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def base_of(store: WeightStore, digest: str) -> WeightStore:
    """The store, below `store`, whose version `BASE` is the base of that digest."""
    return WeightStore.over(store.objects.child(f"{_BASES}/{digest}"))


def bases(store: WeightStore) -> list[WeightStore]:
    """The stores of all bases below `store`."""
    found = {path.split("/")[1] for path in store.objects.list(_BASES) if path.count("/") > 1}
    return [base_of(store, digest) for digest in sorted(found) if _DIGEST.fullmatch(digest)]


def publish_base(store: WeightStore, state: Mapping[str, Tensor], files: Mapping[str, bytes]) -> str:
    """Puts a base, whole weights with its model's `files`, below `store` unless it is there; its digest. What `publish` raises."""
    digest = digest_of(state)
    base = base_of(store, digest)
    if BASE not in base.versions():
        with contextlib.suppress(VersionTaken):  # by another process that has the same base
            base.publish(state, version=BASE, files=files, background=False).result()
    return digest


def verify_with_bases(store: WeightStore, ref: Reference | None = None, progress: Progress | None = None) -> Verification:
    """`WeightStore.verify`, and of adapters also their bases: all that there are, or with `ref` the one that is needed. `progress` counts
    each store by itself. What is damaged in a base is named by its path in `store`."""
    found = store.verify(ref, progress=progress)
    read, damages, needed = found.bytes, list(found.damages), {}
    for version in found.versions:
        try:
            adapter = adapter_of(store.commit(version), store.url)
        except StoreError:
            continue  # of which the verification tells
        if adapter is not None:
            needed[adapter.base] = version
    there = {base.url.rpartition("/")[2]: base for base in bases(store)}
    for digest in sorted(needed if ref is not None else needed | dict.fromkeys(there)):
        path = f"{_BASES}/{digest}"
        more = base_of(store, digest).verify(progress=progress)
        read += more.bytes
        damages += [replace(d, path=f"{path}/{d.path}", version=needed.get(digest)) for d in more.damages]
        if not more.versions and digest in needed:
            damages.append(Damage(path, "is missing, the base of an adapter", needed[digest]))
    return replace(found, bytes=read, damages=tuple(damages))


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """W + scale * B A in W's type, for W [out, in] (transposed: [in, out]), A [rank, in] and B [out, rank]; equation 3 of the paper.

    Computed in at least float32 and rounded once. Whoever merges does it by this, so that all get the same weights.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    change = (b.to(wide) @ a.to(wide)) * scale
    return (weight.to(wide) + (change.T if transposed else change)).to(weight.dtype)


def merge(weights: Mapping[str, Tensor], changes: Mapping[str, Tensor], adapter: Adapter, *, some: bool = False) -> None:
    """Adds an adapter's tensors, named as peft saves them, into those of its base, in place; `some`: `weights` are not all of the base.

    UnknownTensor, before anything changes, for an adapter of another model.
    """
    layers = sorted({name.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B) for name in changes})
    found = {}
    for layer in layers:
        weight, a, b = weights.get(f"{layer}.weight"), changes.get(f"{PREFIX}{layer}{_A}"), changes.get(f"{PREFIX}{layer}{_B}")
        if weight is None and some:
            continue
        if weight is None or a is None or b is None or not _fits(weight, a, b, adapter):
            raise UnknownTensor(f"the adapter's matrices of layer {layer} fit no weight of its base: they are of different models")
        found[layer] = (weight, a, b)
    with torch.no_grad():
        for weight, a, b in found.values():
            weight.copy_(merged_weight(weight, a, b, adapter.scale, transposed=adapter.transposed))


def _fits(weight: Tensor, a: Tensor, b: Tensor, adapter: Adapter) -> bool:
    if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == adapter.rank:
        return False
    shape = (b.shape[0], a.shape[1])
    return tuple(weight.shape) == (shape[::-1] if adapter.transposed else shape)


class Whole:
    """The whole weights of a version: its own, or those of its base with the adapter added in. Damaged if the base is gone."""

    def __init__(self, store: WeightStore, version: Version) -> None:
        self.commit = store.commit(version)
        self.adapter = adapter_of(self.commit, store.url)
        self._store, self._base = store, store
        self._changes: dict[str, Tensor] | None = None
        self.layout = self.commit
        """The commit that says which whole tensors there are."""
        if self.adapter is not None:
            self._base = base_of(store, self.adapter.base)
            try:
                self.layout = self._base.commit(BASE)
            except VersionMissing as error:
                raise Damaged(what=self._base.url, reason="is missing, the base of an adapter", url=store.url, version=version) from error

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return self.layout.tensors

    def pull(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """All tensors or the named ones, as `WeightStore.pull` gives them."""
        found = self._base.pull(self.layout.version, names=names)
        if self.adapter is not None:
            if self._changes is None:
                self._changes = self._store.pull(self.commit.version)
            merge(found, self._changes, self.adapter, some=names is not None)
        return found


def config_with_base(config: bytes, base: str) -> bytes:
    """peft's configuration of an adapter, which says that its base is at `base`."""
    said: dict[str, Any] = json.loads(config)
    return json.dumps({**said, "base_model_name_or_path": base}, indent=2, sort_keys=True).encode()
