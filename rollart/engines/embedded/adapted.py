"""What new weights are read from: a folder of whole ones, or an adapter's, whose base stays in memory. Serves nothing and knows no model.

An adapter is merged where it is staged, each time into what the base's file says, so nothing adds up over many versions. Served as products
of low rank beside the base it would cost each pass: 15 ms of 60 for a policy of 135 million parameters at rank 16 on one core,
where merging takes half a second for each version, and what is served is bit for bit what the trainer has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollart.engines.adapter_folder import BASE_FOLDER, holds_adapter, read_adapter
from rollart.engines.embedded.weights import WeightsError, read_weights

__all__ = ["WeightSource"]


class WeightSource:
    """Reads what `wanted` names, under these names or their `aliases`, onto `device`. `bytes_read` counts the bytes of the files that it read."""

    def __init__(self, wanted: Mapping[str, Tensor], aliases: Mapping[str, str], device: torch.device) -> None:
        self._wanted, self._aliases, self._device = wanted, aliases, device
        self._base: dict[str, Tensor] = {}
        self._exact: dict[str, Tensor] = {}
        self._digest: str | None = None
        self.bytes_read = 0

    def read(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        """The weights in `folder`, each of which the caller may hold and must not change: an adapter's untouched ones are the base's own.

        WeightsError, perhaps after some, as `read_weights` has it, or if an adapter is of another model.
        """
        if holds_adapter(folder):
            return self._adapted(folder)
        self._base, self._exact, self._digest = {}, {}, None
        return self._whole(folder)

    def _whole(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        yield from read_weights(folder, self._wanted, self._aliases, self._device)
        self.bytes_read += sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def _adapted(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        from storage.errors import UnknownTensor  # where an adapter has come, its host has the store's package too
        from storage.models.adapters import PREFIX, merge

        try:
            adapter, changes, size = read_adapter(folder)
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(f"the adapter in {folder} cannot be read: {error}") from error
        self.bytes_read += size
        if adapter.base != self._digest:
            self._base, self._exact, self._digest = {}, {}, None  # the old one goes first: there may be no room for two
            self._base = dict(self._whole(folder / BASE_FOLDER))
            self._digest = adapter.base
        layers = {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in changes}
        self._keep_exact(folder / BASE_FOLDER, [f"{layer}.weight" for layer in layers])
        merged = {name: self._exact[name].clone() for name in (f"{layer}.weight" for layer in layers) if name in self._exact}
        try:
            merge(merged, {name: value.to(self._device) for name, value in changes.items()}, adapter)
        except UnknownTensor as error:
            raise WeightsError(str(error)) from error
        served = {self._aliases.get(name, name): value for name, value in merged.items()}
        for name, tensor in self._base.items():
            value = served.pop(name, tensor).to(tensor.dtype)
            if value is not tensor and not bool(torch.isfinite(value).all()):
                raise WeightsError(f"{name} holds values that are not finite in {value.dtype}, with the adapter added in")
            yield name, value

    def _keep_exact(self, base: Path, names: list[str]) -> None:
        """Holds the base's matrices of these names in the type of its file, from which merging rounds once."""
        missing = [name for name in names if name not in self._exact and self._aliases.get(name, name) in self._base]
        for file in sorted(base.glob("*.safetensors")) if missing else []:
            try:
                with safe_open(file, framework="pt", device="cpu") as reader:
                    stored = set(reader.keys())
                    for name in stored.intersection(missing):
                        held = self._base[self._aliases.get(name, name)]
                        if reader.get_slice(name).get_dtype() == _SPELLED.get(held.dtype):
                            self._exact[name] = held
                            continue
                        self._exact[name] = reader.get_tensor(name).to(device=self._device, copy=True)
                        self.bytes_read += self._exact[name].nbytes
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file} cannot be read: {error}") from error


_SPELLED = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
