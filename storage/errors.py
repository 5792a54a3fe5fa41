"""What can go wrong with a store, as types; owns the wording, and no way of finding out."""

from __future__ import annotations

from storage.version import Version

__all__ = [
    "BadReference", "ConditionIgnored", "Damaged", "DeviceRefused", "FolderRefused", "ForkedStore", "LeaseExpired", "ObjectMissing",
    "PartRefused", "PartsMissing",
    "PublishTooLong", "ShardsRefused", "SliceRefused", "StoreError", "StoreUnreachable", "TensorMismatch", "UnknownFile", "UnknownFormat",
    "UnknownTag", "UnknownTensor", "UnsafePath", "UnsupportedTensor", "VersionDiffers", "VersionMissing", "VersionPassed", "VersionTaken",
]  # fmt: skip


class StoreError(Exception):
    """Anything that a store or what is in it does wrong; every error of this package is one. Travels by pickle, fields and all."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class StoreUnreachable(StoreError):
    """The store can't be opened, read or written: unknown protocol, no such bucket, no permission, no network, no space."""


class ConditionIgnored(StoreUnreachable):
    """The server accepts a write that should happen only if the object is absent, so two publishers could both win."""


class ForkedStore(StoreError):
    """A store is used in a process that was forked after the store was opened."""


class FolderRefused(StoreError, ValueError):
    """A folder that isn't the Hugging Face model it should be, or that is in use where an empty one is needed."""


class ObjectMissing(StoreError):
    """An object that was asked for by its path isn't there."""


class UnsafePath(StoreError, ValueError):
    """A path that would leave the store, or that isn't spelled as the one name of its object."""


class BadReference(StoreError, ValueError):
    """A text that can't name a version: neither LINEAGE-STEP, nor `newest`, nor spelled as a tag."""


class UnknownTag(StoreError, LookupError):
    """A tag that the store doesn't have."""


class LeaseExpired(StoreError):
    """A lease that was to be renewed ended before that, so what it held may have gone: take a new one."""


class UnsupportedTensor(StoreError, TypeError):
    """A tensor that has no plain array form: sparse, quantized, on the meta device, or of a type that no array here holds."""


class UnknownTensor(StoreError, KeyError):
    """A tensor, by its name, that the version doesn't have."""

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0])


class UnknownFile(StoreError, KeyError):
    """A file of a model's folder, by its name, that the version doesn't have."""

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0])


class TensorMismatch(StoreError, ValueError):
    """A tensor to read into has another shape or type than the stored one."""


class DeviceRefused(StoreError, ValueError):
    """A device that tensors can't be read to: there is no such one, or this process has no use of it."""


class SliceRefused(StoreError, IndexError):
    """A part of a tensor that it doesn't have, or that can't be asked for: out of range, in steps, of too many dimensions."""


class UnknownFormat(StoreError):
    """A commit of a later format, or one that needs a feature which this release doesn't have."""


class VersionMissing(StoreError, LookupError):
    """No commit makes this version exist in this store."""

    def __init__(self, version: Version | None, url: str) -> None:
        what = "any version" if version is None else f"version {version}"
        super().__init__(f"{url} doesn't hold {what}; versions() lists what it holds")
        self.version = version


class VersionTaken(StoreError):
    """Another publisher committed this version first; what it holds is theirs, and ours was dropped whole."""

    def __init__(self, version: Version, url: str) -> None:
        super().__init__(f"version {version} of {url} exists already: another publisher committed it; pull it, or publish the next one")
        self.version = version


class VersionDiffers(StoreError):
    """Two stores have different versions of the same number, so that one can't be copied over the other."""

    def __init__(self, version: Version, source: str, target: str) -> None:
        super().__init__(f"{target} has another version {version} than {source}: copy into a store of its own, or remove the one that is wrong")
        self.version = version


class VersionPassed(StoreError):
    """A version that comes before the newest one of its lineage: versions of a lineage only go up, so nothing was written."""

    def __init__(self, version: Version, newest: Version, url: str) -> None:
        super().__init__(
            f"version {version} can't be published to {url} any more, since {newest} is there: publish a later step, or go back to a "
            "version by opening a lineage"
        )
        self.version = version
        self.newest = newest


class PublishTooLong(StoreError):
    """A publish took so long that a collector may take its data for a dead attempt's; it gave up and its data is gone."""

    def __init__(self, version: Version, took: float, longest: float, url: str) -> None:
        super().__init__(
            f"publishing version {version} to {url} took {took / 3600:.1f} hours, more than the {longest / 3600:g} after which its data may be "
            "swept: publish it again, and less at once or to a faster store if it wasn't the machine that slept"
        )
        self.version = version


class PartRefused(StoreError, ValueError):
    """A part of a version that can't be: of no rank that there is, or of an attempt that isn't spelled like one."""


class PartsMissing(StoreError):
    """Not all ranks have written their part of a version, so that it can't be committed yet."""

    def __init__(self, version: Version, ranks: tuple[int, ...], url: str) -> None:
        named = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
        super().__init__(
            f"version {version} can't be committed to {url}: nothing of rank{'' if len(ranks) == 1 else 's'} {named} is there; "
            "commit once publish_part has returned on every rank"
        )
        self.version = version
        self.ranks = ranks


class ShardsRefused(StoreError, ValueError):
    """Parts of a tensor that several ranks wrote, and that don't make it up: with gaps, overlapping, of other shapes or types."""


class Damaged(StoreError):
    """Stored bytes are missing, cut short, changed or contradictory. `tensor` is None if it isn't one tensor's bytes."""

    def __init__(self, *, what: str, reason: str, url: str, version: Version | None = None, tensor: str | None = None) -> None:
        whose = f"tensor {tensor!r} of " if tensor is not None else ""
        which = f"version {version} " if version is not None else ""
        super().__init__(f"{whose}{which}in {url} is damaged: {what} {reason}; use another version, or write this one again as a new one")
        self.version = version
        self.tensor = tensor
        self.what = what
        self.reason = reason


def _rebuild(kind: type[StoreError], args: tuple[object, ...], fields: dict[str, object]) -> StoreError:
    """Errors travel between Dask workers as their message and fields, not through their constructors."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error
