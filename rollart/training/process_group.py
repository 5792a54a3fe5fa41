"""The torch process group that this process is in: joined and left as ranks come and go; owns its errors, knows no learner and no Dask.

There is at most one in a process. Nothing but torch's own globals may hold it: what is left of a group that broke keeps its
connections open, and the ranks at their other ends wait until their time is up instead of hearing at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch documents them, and does not list them

from rollart.training.errors import GroupBroken

__all__ = ["ProcessRanks", "leave", "open_store"]

T = TypeVar("T")

_GONE = "a rank is gone, or silent for too long"

_BUCKET = 2**23
"""Numbers that one all-reduce takes: enough to hide what a message costs, few enough for their copy not to matter."""


def open_store(host: str) -> TCPStore:
    """A store at `host`, on a free port, where ranks find each other; it is there as long as somebody holds it."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


class ProcessRanks:
    """The ranks of a process group; see `Ranks`. Collectives run over gloo for tensors on the CPU, over nccl for those on CUDA."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    @classmethod
    def join(cls, host: str, port: int, generation: int, rank: int, count: int, *, device: str, timeout_s: float) -> ProcessRanks:
        """Joins `count - 1` others at the store of `host` and `port`; GroupBroken if they aren't all there in time, or if one says nothing
        for so long later on. `generation` keeps the ranks of one group from meeting those of an earlier one."""
        leave()
        _talk_over(host)
        patience = timedelta(seconds=timeout_s)

        def join() -> None:
            store = PrefixStore(f"generation-{generation}", TCPStore(host, port, is_master=False, timeout=patience))
            backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=patience)

        _told(f"rank {rank} of {count} could not join generation {generation}", join)
        return cls(rank, count)

    def gather(self, mine: T) -> list[T]:
        found: list[Any] = [None] * self.count
        _told(_GONE, lambda: dist.all_gather_object(found, mine))
        return found

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            whole = torch.cat([t.reshape(-1) for t in bucket])
            _told(_GONE, partial(dist.all_reduce, whole))
            for tensor, part in zip(bucket, whole.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def hand_round(self, source: int, arrays: Mapping[str, Tensor] | None = None, document: Any = None) -> tuple[dict[str, Tensor], Any]:
        """What rank `source` gave, on every rank: tensors on the CPU, by name, and a document that travels by pickle."""
        said: list[Any] = [None]
        if self.rank == source:
            shapes = {name: (tuple(value.shape), value.dtype) for name, value in (arrays or {}).items()}
            said = [(shapes, document)]
        _told(_GONE, lambda: dist.broadcast_object_list(said, source))
        shapes, document = said[0]
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            value = arrays[name].detach().cpu().contiguous() if self.rank == source and arrays is not None else torch.empty(shape, dtype=dtype)
            _told(_GONE, partial(dist.broadcast, value, source))
            found[name] = value
        return found, document


def leave() -> None:
    """Leaves the group that this process is in, if any: connections close, which the other ranks notice at once."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _told(what: str, collective: Callable[[], object]) -> None:
    """Calls `collective`; GroupBroken that says `what` if it fails."""
    try:
        collective()
        return
    except RuntimeError as error:  # gloo's and nccl's errors, and those of torch's store, are all of this kind
        reason = str(error).splitlines()[0]
    # Outside of the handler: as its context, the error would hold on to the group by its frames.
    raise GroupBroken(f"{what}: {reason}")


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one kind together, at most `_BUCKET` numbers or one tensor; the same on every rank for the same tensors."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        other = bucket and (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (other or sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _talk_over(host: str) -> None:
    """Has gloo listen where this machine reaches `host`, unless the environment says where: its own choice, the address of the machine's
    name, is the loopback's on many."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it asks for the route
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == mine for a in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
