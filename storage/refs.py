"""How people write which version of which store they mean; owns the spelling, and reads nothing but a tag."""

from __future__ import annotations

import re
from collections.abc import Callable

from storage.errors import BadReference, UnknownTag, VersionMissing
from storage.keeping.tags import NEWEST, Tags, checked_tag
from storage.objects.store import ObjectStore
from storage.version import Version

__all__ = ["NEWEST", "Reference", "named", "parse_location", "resolve"]

Reference = Version | str
"""A version, or text that names one: `0-42`, a tag's name, `newest`."""

_AUTHORITY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)")
_BUCKETS = {"s3", "s3a", "gs", "gcs", "memory"}
"""Schemes whose first part is a bucket and never `user@host`, so that `s3://bucket@best` has a reference in it."""


def named(text: str) -> Version | str:
    """The version that `text` spells, else `text` itself: `newest` or a tag's name. BadReference for anything else."""
    try:
        return Version.parse(text)
    except ValueError:
        return text if text == NEWEST else checked_tag(text)


def parse_location(text: str) -> tuple[str, str | None]:
    """`URL@REF` as (URL, REF), REF None where there is no `@`: then the newest version is meant.

    Only an `@` in the URL's last part counts, so that `abfs://box@account/w` and `sftp://user:word@host/w` are URLs. A folder whose
    own name has an `@` is written with a reference behind it (`/data/run@1@newest`). BadReference if REF can't be one.
    """
    if not text.strip() or text.rstrip("/").endswith(":"):  # and neither the root of the disk nor a list of all buckets
        raise BadReference(f"{text[:200]!r} names no store: write a path or a URL, such as s3://bucket/run/weights")
    authority = _AUTHORITY.match(text)
    last = text.rfind("/") + 1
    if authority is not None and last <= authority.start(2) and (authority[1].lower() not in _BUCKETS or ":" in authority[2]):
        return text, None
    at = text.rfind("@")
    if at < last:
        return text, None
    url, ref = text[:at], text[at + 1 :]
    if not url or url.endswith("://"):
        raise BadReference(f"{text[:200]!r} names no store before its '@': write URL@VERSION, such as s3://bucket/run/weights@0-42")
    named(ref)
    return url, ref


def resolve(ref: Reference | None, store: ObjectStore, newest: Callable[[], Version | None]) -> Version:
    """The version that `ref` names in `store`; None means the newest.

    VersionMissing if there is none at all; UnknownTag; BadReference. Whether the version (still) exists is seen when it is read.
    """
    name = NEWEST if ref is None else named(ref) if isinstance(ref, str) else ref
    if isinstance(name, Version):
        return name
    found = newest() if name == NEWEST else Tags(store).find(name)
    if found is None and name != NEWEST:
        raise UnknownTag(f"{store.url} has no tag {name!r}; tags() lists those it has")
    if found is None:
        raise VersionMissing(None, store.url)
    return found
