"""What the clients of stores raise, and what it means; owns that reading only, and raises nothing itself."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator

_KINDS = (
    ("botocore.exceptions", "BotoCoreError"), ("botocore.exceptions", "ClientError"), ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"), ("gcsfs.retry", "ChecksumError"), ("google.auth.exceptions", "GoogleAuthError"),
    ("requests.exceptions", "RequestException"),
)  # fmt: skip

_PASSING_KINDS = (
    ("botocore.exceptions", "HTTPClientError"), ("botocore.exceptions", "ConnectionError"), ("botocore.exceptions", "IncompleteReadError"),
    ("botocore.exceptions", "ResponseParserError"), ("botocore.exceptions", "FlexibleChecksumError"), ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"), ("gcsfs.retry", "ChecksumError"), ("google.auth.exceptions", "TransportError"),
    ("requests.exceptions", "ConnectionError"), ("requests.exceptions", "Timeout"), ("requests.exceptions", "ChunkedEncodingError"),
)  # fmt: skip
"""A connection that can't be made, breaks or stalls, and a reply that arrives in part or as something else than it was sent as."""

_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset(
    {
        "BadDigest", "IncompleteBody", "InternalError", "RequestLimitExceeded", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling",
        "ThrottlingException", "TooManyRequests", "XAmzContentSHA256Mismatch",
    }
)  # fmt: skip

_FULL_STATUS = 507
_FULL_CODES = frozenset({"InsufficientStorage", "QuotaExceeded", "StorageFull", "XMinioStorageFull"})
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_WORDS = ("no writable volumes", "no free volumes", "no space left on device")
"""What servers that answer 500 for it say in the text (SeaweedFS)."""

_CONFLICTS = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
_NO_RANGE = 416
_NO_CONDITIONS = frozenset({"NotImplemented", "501"})


def client_errors() -> tuple[type[Exception], ...]:
    """Error types of those clients that are loaded: none of them is imported only for its errors."""
    return (OSError, ImportError, *_loaded(_KINDS))


def s3_code(error: BaseException) -> str | None:
    """The S3 error code in or behind what s3fs raised, if there is one."""
    response = _response(error)
    code = response.get("Error", {}).get("Code")
    return None if code is None else str(code)


def status(error: BaseException) -> int | None:
    """The HTTP status that a server answered with, if that is what went wrong."""
    found = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode") or getattr(error, "code", None) or getattr(error, "status", None)
    return int(found) if isinstance(found, int | str) and str(found).isdigit() else None


def is_full(error: BaseException) -> bool:
    """Whether there is no room left: on a disk, under a quota, or on a server."""
    if getattr(error, "errno", None) in _FULL_ERRNOS or status(error) == _FULL_STATUS or s3_code(error) in _FULL_CODES:
        return True
    text = str(error).lower()
    return any(words in text for words in _FULL_WORDS)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed a moment later: throttling, a server's own trouble, a lost connection, a cut reply."""
    if is_full(error):
        return False
    if status(error) in _PASSING_STATUS or s3_code(error) in _PASSING_CODES:
        return True
    return isinstance(error, (ConnectionError, TimeoutError, *_loaded(_PASSING_KINDS)))


def is_conflict(error: BaseException) -> bool:
    """Whether a conditional write met another one under way, so that only a second try can tell who won."""
    return s3_code(error) in _CONFLICTS or status(error) == 409


def is_refused_condition(error: BaseException) -> bool:
    """Whether a conditional write was refused since the object is there."""
    # s3fs makes a FileExistsError of it only if the server's reply names the condition.
    return isinstance(error, FileExistsError) or s3_code(error) == "PreconditionFailed" or status(error) == 412


def is_no_condition(error: BaseException) -> bool:
    """Whether the server says that it doesn't know conditional writes."""
    return s3_code(error) in _NO_CONDITIONS or status(error) == 501


def is_past_end(error: BaseException) -> bool:
    """Whether a range was asked for that begins where the object ends, or later."""
    return s3_code(error) in {"InvalidRange", "416"} or status(error) == _NO_RANGE


def advice(error: BaseException) -> str:
    """What to do about an error, as the end of a sentence; empty if its own text has to do."""
    if is_full(error):
        return "; the store is full: free space there or raise its quota, then write again (what was there before stays as it was)"
    if s3_code(error) == "NoSuchBucket":
        return "; make the bucket, or correct its name"
    if isinstance(error, PermissionError) or status(error) in {401, 403} or str(error).startswith("Forbidden"):
        return "; check the credentials (environment, profile or key file) and what they allow here"
    return ""


def _response(error: BaseException) -> dict[str, dict[str, object]]:
    for link in (error, error.__cause__):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _loaded(kinds: tuple[tuple[str, str], ...]) -> Iterator[type[Exception]]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in kinds)
    return (kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))
