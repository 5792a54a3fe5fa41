"""The small object that makes a version exist; owns its format on the wire and its checks, not where or when it is put."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic
import pydantic_core

from storage.errors import Damaged, UnknownFormat, UnsafePath
from storage.format import layout
from storage.format.delta_index import check_deltas
from storage.format.index import ArrayEntry, DeltaEntry, IndexRefused, ObjectEntry, TensorEntry, check_attempt, check_index
from storage.objects import paths
from storage.version import Version

JSON = pydantic.JsonValue
"""Anything that JSON can say: None, bool, int, float, str, lists, and dicts with string keys."""

FORMAT = 1
"""The format written. A reader refuses any other; a feature that older readers must not ignore goes into `requires` instead."""

FEATURES: frozenset[str] = frozenset({"deltas", "shards"})
"""What of `requires` this release can read."""

_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SEAL_BYTES = 77
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_COMMIT = 256 << 20


@dataclass(frozen=True, slots=True)
class Commit:
    """One version: what its arrays, tensors and documents are, where it came from, and what its writer says of it (`metadata`).

    `created` is in seconds since 1970. `attempt` names the data's folder. `base` is the version that `deltas` are changes of, None
    for a full one. `parent` is the version that training started from. `objects` are Zarr's own metadata objects, `documents`
    JSON objects by name; keys of both, and of chunks, are relative to the attempt's folder. `files` are those of the model's
    folder (config, tokenizer) by name; their keys are relative to the store, since versions share them.
    """

    format: int
    requires: tuple[str, ...]
    version: Version
    parent: Version | None
    base: Version | None
    attempt: str
    created: float
    arrays: dict[str, ArrayEntry]
    tensors: dict[str, TensorEntry]
    objects: tuple[ObjectEntry, ...] = ()
    documents: dict[str, ObjectEntry] = field(default_factory=dict)
    files: dict[str, ObjectEntry] = field(default_factory=dict)
    deltas: dict[str, DeltaEntry] = field(default_factory=dict)
    metadata: dict[str, JSON] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Stored bytes of the version's arrays and documents."""
        chunks = sum(chunk.bytes for array in self.arrays.values() for chunk in array.chunks)
        return chunks + sum(document.bytes for document in self.documents.values())


_ADAPTER = pydantic.TypeAdapter(Commit)


def sealed(text: bytes) -> bytes:
    """A JSON object's text with a last member `sha256` over all the text before it, so that any changed byte is found."""
    body = text[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def unsealed(data: bytes, what: str, url: str) -> dict[str, Any]:
    """The JSON object that `sealed` text holds; Damaged or UnknownFormat, naming `what` of the store `url`.

    The format number is looked at first: a later format may be sealed in another way.
    """
    if len(data) > _LARGEST_COMMIT:
        raise Damaged(what=what, reason=f"has {len(data)} bytes, more than any commit", url=url)
    try:
        found = pydantic_core.from_json(data)
    except ValueError as error:
        raise Damaged(what=what, reason=f"is cut short or isn't JSON ({error})", url=url) from error
    if not isinstance(found, dict):
        raise Damaged(what=what, reason="isn't a JSON object", url=url)
    number = found.get("format")
    if not isinstance(number, int):
        raise Damaged(what=what, reason="has no format number", url=url)
    if number != FORMAT:
        raise UnknownFormat(f"{what} of {url} has format {number}; this release reads format {FORMAT}: use a newer one")
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if seal is None or hashlib.sha256(data[:-_SEAL_BYTES]).hexdigest().encode() != seal[1]:
        raise Damaged(what=what, reason="doesn't match its own checksum", url=url)
    return found


def encode(commit: Commit) -> bytes:
    """The commit as the bytes of its object. ValueError if they are more than a reader takes."""
    data = sealed(_ADAPTER.dump_json(commit))
    if len(data) > _LARGEST_COMMIT:
        raise ValueError(f"the commit of version {commit.version} has {len(data)} bytes and readers take {_LARGEST_COMMIT}: give less metadata")
    return data


def decode(data: bytes, version: Version, what: str, url: str) -> Commit:
    """The commit of `version` from the bytes of its object `what`, with every size, offset, name and key checked.

    Damaged if it contradicts itself, its version or its checksum; UnknownFormat if it is of another format.
    """
    found = unsealed(data, what, url)
    required = found.get("requires") or []
    if not isinstance(required, list):
        raise Damaged(what=what, reason="is refused: what it requires is no list", url=url, version=version)
    unknown = set(map(str, required)) - FEATURES
    if unknown:
        raise UnknownFormat(f"{what} of {url} needs {', '.join(sorted(unknown))[:200]}, which this release can't read: use a newer one")
    try:
        commit = _ADAPTER.validate_json(data, strict=True)
        _check(commit, version)
    except (ValueError, UnsafePath) as error:
        raise Damaged(what=what, reason=f"is refused: {_reason(error)}", url=url, version=version) from error
    encodings = {tensor.encoding for tensor in commit.tensors.values()} - {"raw"}
    if encodings:
        raise UnknownFormat(f"{what} of {url} has tensors encoded as {', '.join(sorted(encodings))[:200]}: use a newer release")
    return commit


def _reason(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()[:3])


def _check(commit: Commit, version: Version) -> None:
    if commit.version != version:
        raise IndexRefused(f"it says that it is version {commit.version}")
    check_attempt(commit.attempt)
    check_deltas(commit.deltas, commit.arrays)
    check_index(commit.arrays, commit.deltas, commit.tensors)
    _check_base(commit)
    _check_keys(commit.documents)
    for entry in (*commit.objects, *commit.documents.values()):
        paths.checked(entry.key)
    _check_files(commit.files)


def _check_base(commit: Commit) -> None:
    if (commit.base is not None) != bool(commit.deltas):
        raise IndexRefused(f"it has base {commit.base} and {len(commit.deltas)} arrays of changes: either both or none")
    if commit.base is not None and commit.base >= commit.version:
        raise IndexRefused(f"it is said to be changes of {commit.base}, which isn't older")


def _check_keys(documents: Mapping[str, ObjectEntry]) -> None:
    for name, entry in documents.items():
        if entry.bytes < 0 or not entry.key.startswith("documents/"):
            raise IndexRefused(f"document {name[:40]!r} has a wrong key or size: {entry.key[:60]!r}, {entry.bytes} bytes")


def _check_files(files: Mapping[str, ObjectEntry]) -> None:
    for name, entry in files.items():
        if "/" in paths.checked(name) or entry.bytes < 0 or _DIGEST.fullmatch(entry.sha256) is None or entry.key != layout.file_key(entry.sha256):
            raise IndexRefused(f"file {name[:40]!r} has a wrong name, key or size: {entry.key[:60]!r}, {entry.bytes} bytes")
