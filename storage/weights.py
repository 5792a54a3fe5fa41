"""Publishes and pulls versions of a model's weights; owns the background publish, not what a version is trained on."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pydantic_core
import torch

from storage.arrays.packing import pack
from storage.arrays.parts import Shard, array_suffix
from storage.arrays.selection import Slices
from storage.arrays.unpacking import NO_SLICES
from storage.arrays.writing import new_attempt
from storage.delta_writer import DeltaWriter
from storage.errors import Damaged, VersionMissing
from storage.format.commit import JSON, Commit
from storage.keeping.collection import Collection, collect
from storage.keeping.following import Follower, follow, follow_async
from storage.keeping.leases import Lease, Leases
from storage.keeping.retention import Retention
from storage.keeping.tags import Tags
from storage.keeping.verification import Verification
from storage.model_files import check_file_names, read_file
from storage.objects.store import ObjectStore
from storage.parted import PartedVersions
from storage.progress import Progress
from storage.publication import Publication, Publisher
from storage.refs import NEWEST, Reference
from storage.version import Version
from storage.versions import VersionedStore

__all__ = ["Commit", "JSON", "Publication", "Shard", "WeightStore", "new_attempt"]

_NEWEST_TRIES = 4
"""How often a pull of the newest version begins: each time again only if a whole one was published, and that one collected, meanwhile."""

_log = logging.getLogger(__name__)

_NOTHING: Mapping[str, JSON] = MappingProxyType({})
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_NO_SHARDS: Mapping[str, Shard] = MappingProxyType({})


class WeightStore:
    """Versions of a model's weights at `url`: a local path, or any URL that fsspec opens with `storage_options`.

    A version exists from one moment on, whole, or not at all, whatever dies meanwhile; it never changes. Travels by pickle
    (without publishes under way), and can be used from threads and in spawned processes; after a fork, make a new one.

    `durable` has local publishes reach the disk (fsync) before they count: take it where a version has to survive a power cut, as
    the only copy of a run's result has to, and leave it where a crash of the machine ends the run anyway. Buckets always do so.

    With `full_every` above 1, `publish` stores what has changed since the version that this object published before, where that takes
    less, and at least every `full_every`-th version whole (see `DeltaWriter`). For that the object keeps a copy of what it published
    last, which is one state's memory. Such versions are pulled like any other; `chain` says what a pull of one needs.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, *, durable: bool = False, full_every: int = 1) -> None:
        self._open(ObjectStore(url, storage_options, durable=durable), full_every)

    @classmethod
    def over(cls, objects: ObjectStore, full_every: int = 1) -> WeightStore:
        """The weights in an object store that is open already."""
        weights = cls.__new__(cls)
        weights._open(objects, full_every)
        return weights

    def _open(self, objects: ObjectStore, full_every: int) -> None:
        self._versioned = VersionedStore(objects)
        self._writer = DeltaWriter(self._versioned, full_every)
        self._parts = PartedVersions(self._versioned)
        self._publisher = Publisher()

    def __repr__(self) -> str:
        return f"WeightStore({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return WeightStore.over, (self._versioned.store, self._writer.full_every)

    @property
    def url(self) -> str:
        return self._versioned.store.url

    @property
    def objects(self) -> ObjectStore:
        """The objects that the versions are made of."""
        return self._versioned.store

    def publish(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        step: int | None = None,
        version: Version | None = None,
        parent: Version | None = None,
        metadata: Mapping[str, JSON] = _NOTHING,
        files: Mapping[str, bytes] = _NO_FILES,
        background: bool = True,
    ) -> Publication:
        """Copies the tensors and returns; the copy is then written, and committed as a version, in the background.

        The version is `step` of the newest lineage (0 in an empty store), or `version` as a whole; not both. `parent` is the version
        that training started from, `metadata` anything that JSON can say of this one, `files` those of the model's folder (config,
        tokenizer), by plain name; equal ones are stored once for all versions. The caller may change the tensors as soon as this
        returns. Without `background`, no copy is made (unless deltas need one): this returns once the version exists, or raises what
        `Publication.result` does, and nothing may change the tensors meanwhile.

        ValueError for a version that isn't named in one way; UnsupportedTensor; UnsafePath for a file's name; TypeError or ValueError
        for metadata that isn't JSON.
        """
        self._publisher.check_process()
        number = self._number(step, version)
        said = _json(metadata)
        check_file_names(files)
        packed = pack(state, copy=background or self._writer.keeps)
        write = partial(self._writer.put, number, packed, parent=parent, metadata=said, files=dict(files))
        return self._publisher.behind(number, write) if background else self._publisher.before(number, write)

    def publish_part(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        version: Version,
        attempt: str,
        rank: int,
        ranks: int,
        shards: Mapping[str, Shard] = _NO_SHARDS,
    ) -> None:
        """Writes what this one of `ranks` ranks holds of `version`, and returns once it is there; `commit_parts` then makes it exist.

        `attempt` comes from `new_attempt()`, once for all ranks. Tensors in `shards` are boxes of larger ones; others are whole. One
        rank has to write each value: leave out what another one writes. ShardsRefused for a shard outside of its tensor;
        PartRefused for a rank or an attempt that can't be; VersionTaken, VersionPassed, UnsupportedTensor, StoreUnreachable.
        """
        self._parts.write(pack(state, copy=False, suffix=array_suffix(rank)), version, attempt, rank, ranks, shards)

    def commit_parts(
        self,
        version: Version,
        attempt: str,
        ranks: int,
        *,
        parent: Version | None = None,
        metadata: Mapping[str, JSON] = _NOTHING,
        files: Mapping[str, bytes] = _NO_FILES,
    ) -> Version:
        """Makes `version` exist, of the parts that `ranks` ranks have written as `attempt`; one process calls this, once.

        PartsMissing names the ranks that haven't; they may still do so. ShardsRefused names a tensor that isn't made up exactly once.
        PartRefused, VersionTaken, VersionPassed, PublishTooLong.
        """
        said = _json(metadata)
        return self._parts.commit(version, attempt, ranks, parent=parent, metadata=said, files=files).version

    def pull(
        self,
        version: Reference | None = None,
        *,
        names: Iterable[str] | None = None,
        slices: Mapping[str, Slices] = NO_SLICES,
        device: torch.device | str | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        base: Version | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors of `version` (see `resolve`; default: the newest), or the named ones, every byte checked.

        `slices` cuts tensors by name, as between brackets: ints, slices of step 1 and tuples of them; rows cost their own bytes, columns
        at most those of their rows. Tensors in `out` are read into those given there, of the shape and type of what is read, on any
        device; the others are new, on `device` (default: CPU). Tied tensors come back as one if they are cut alike. VersionMissing,
        Damaged, UnknownFormat, UnknownTensor, SliceRefused, DeviceRefused or TensorMismatch; after an error `out` is undefined. Where
        the newest is asked for and is collected meanwhile, the one that is the newest then is pulled, after a few times an error.

        `base` says that `out` holds all of that version. If it is on the `chain` of the one that is pulled, only the changes since are
        read, and applied in place; if not, all is read into `out`. Either way every value is checked: Damaged if `out` held something
        else. ValueError together with `names`, `slices` or `device`.
        """
        if base is not None and (names is not None or slices or device is not None):
            raise ValueError("pull: with base, out is brought from one whole version to another; leave out names, slices and device, or base")
        asked = None if names is None else list(names)
        attempt = 1
        while True:
            found = self._versioned.resolve(version)
            try:
                commit = self.commit(found)
                if base is not None:
                    return self._versioned.updated(commit, base, out or {})
                return self._versioned.tensors(commit, asked, slices=slices, device=device, out=out or {})
            except (VersionMissing, Damaged) as error:
                # (Changes that were applied in part can't be applied again.)
                anew = (version is None or version == NEWEST) and attempt < _NEWEST_TRIES and (base is None or isinstance(error, VersionMissing))
                if not anew or found in self.versions():
                    raise
                attempt += 1
                _log.warning("%s of %s was collected while it was pulled; attempt %d of %d follows", found, self.url, attempt, _NEWEST_TRIES)

    def chain(self, version: Version) -> list[Version]:
        """The versions whose data `version` needs: itself, then the one that it holds changes of, down to a full one.

        VersionMissing, UnknownFormat, or Damaged if one of them is gone or isn't older than the one before.
        """
        return [commit.version for commit in self._versioned.chain(self.commit(version))]

    def bytes_to_pull(self, version: Version, base: Version | None = None) -> int:
        """Stored bytes that a pull of all of `version` reads, its commits aside; `base`: the version that `out` holds."""
        commits = self._versioned.chain(self.commit(version), base)
        return sum(chunk.bytes for commit in commits for array in commit.arrays.values() for chunk in array.chunks)

    def file(self, version: Reference | None, name: str) -> bytes:
        """A file of the model's folder as it was published with `version` (None: the newest). VersionMissing, UnknownFile, Damaged."""
        return read_file(self.objects, self.commit(self._versioned.resolve(version)), name)

    def newest(self, lineage: int | None = None) -> Version | None:
        """The last version of `lineage` (default: the newest lineage) or, while it has none, the one it branched off; None in an
        empty store. Never a version of an abandoned tail."""
        return self._versioned.newest(lineage)

    def versions(self) -> list[Version]:
        """All versions that exist, ascending, abandoned tails included."""
        return self._versioned.versions()

    def commit(self, version: Version) -> Commit:
        """What a version holds and where it came from, without its tensors. VersionMissing, Damaged or UnknownFormat."""
        return self._versioned.commit(version)

    def open_lineage(self, parent: Version | None) -> int:
        """The number of a new lineage that goes on from `parent` (None: from nothing), which no other caller gets.

        From now on `newest()` is of this lineage. VersionMissing if there is no such parent.
        """
        return self._versioned.open_lineage(parent)

    def check_writable(self) -> None:
        """Raises one StoreUnreachable that says what to do unless versions can be published here."""
        self._versioned.store.check_writable()

    def resolve(self, ref: Reference | None = None) -> Version:
        """The version that `ref` names: a version itself, or as text `0-42`, a tag's name or `newest`; None means the newest.

        VersionMissing if that is asked for and there is none, UnknownTag, BadReference for a text that can name nothing. Whether the
        version still exists is seen when it is read.
        """
        return self._versioned.resolve(ref)

    def tag(self, name: str, ref: Reference) -> Version:
        """Puts tag `name` on a version, taking it off any other; the version, which stays as long as the tag does.

        A name is up to 100 letters, digits and `_.-`, not spelled like a version, not `newest`: else BadReference. VersionMissing.
        """
        version = self.resolve(ref)
        Tags(self.objects).put(name, version)
        return version

    def untag(self, name: str) -> None:
        """Takes a tag away; UnknownTag if there is none."""
        Tags(self.objects).remove(name)

    def tags(self) -> dict[str, Version]:
        """Tag -> version, by name."""
        return Tags(self.objects).all()

    def lease(self, ref: Reference, seconds: float, holder: str = "") -> Lease:
        """Keeps a version, with all that its data needs, for `seconds` by the store's clock, or until the lease is renewed or released.

        Made for `with`. `holder` is shown to whoever asks why the version stays. VersionMissing.
        """
        return Leases(self.objects).take(self.resolve(ref), seconds, holder)

    def gc(self, retention: Retention, *, grace_s: float, now: float | None = None, dry_run: bool = False) -> Collection:
        """Removes what `retention` doesn't keep, and what dead publishers left; what went, and what stays and why.

        A version first stops to exist; its data goes in a collection at least `grace_s` seconds later, so give it at least as long
        as a reader takes, and longer than a collection does. One that reads longer gets Damaged or VersionMissing, never other values.
        `now` is the time by the store's clock (default: asked for, or with `dry_run`, which writes nothing, this machine's). Several
        collections may run at once, beside publishers; one that is killed is finished by the next. Damaged or UnknownFormat if a
        record or a commit hides what it keeps; StoreUnreachable.
        """
        return collect(self.objects, retention, grace_s=grace_s, now=now, dry_run=dry_run)

    def verify(self, ref: Reference | None = None, *, progress: Progress | None = None) -> Verification:
        """Reads all that one version (default: every one) consists of, with those that its data needs, and checks every byte.

        A few chunks are in memory at a time. `progress` hears the stored bytes that are checked and those there are; what changes come
        to is looked at after that. What is damaged is in the result, not raised; VersionMissing or UnknownTag for a version that
        isn't there.
        """
        return self._versioned.verify(ref, progress)

    def follow(
        self,
        *,
        after: Version | None = None,
        window: int | None = None,
        poll_s: float = 1.0,
        stop: threading.Event | None = None,
        timeout: float | None = None,
    ) -> Iterator[Version]:
        """Versions newer than `after` (None: from the first), in order, as they appear; ends when `stop` is set or nothing new came
        for `timeout` seconds.

        One that is more than `window` steps older than the newest by the time it would be given is skipped: 0 gives only ever
        the newest, None all. Versions of an abandoned tail are never given; when a lineage begins, its versions are what comes
        next. A store that can't be reached is asked again a few times, ever later, before StoreUnreachable.
        """
        return follow(Follower(self.objects, after, window, poll_s, timeout), stop)

    def follow_async(
        self, *, after: Version | None = None, window: int | None = None, poll_s: float = 1.0, timeout: float | None = None
    ) -> AsyncIterator[Version]:
        """As `follow`, for `async for` inside of a running loop, which stays free; cancel the task to end it."""
        return follow_async(Follower(self.objects, after, window, poll_s, timeout))

    def _number(self, step: int | None, version: Version | None) -> Version:
        if (step is None) == (version is None):
            raise ValueError("publish takes a step (of the newest lineage) or a whole version: give one of them, and not both")
        return version if version is not None else Version(self._versioned.next_lineage(), step or 0)


def _json(metadata: Mapping[str, JSON]) -> dict[str, JSON]:
    """A copy of what JSON can say, as deep in a commit as it will be; TypeError or ValueError for what couldn't be read from there."""
    try:
        text = json.dumps({"metadata": dict(metadata)}, allow_nan=False)
    except RecursionError as error:
        raise ValueError("metadata is nested too deeply") from error
    try:
        found: dict[str, JSON] = pydantic_core.from_json(text)["metadata"]
    except ValueError as error:
        raise ValueError(f"metadata is nested too deeply, or has text that isn't Unicode ({error})") from error
    return found
