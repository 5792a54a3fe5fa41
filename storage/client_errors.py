"""What the clients of stores raise that isn't an OSError; owns that list only."""

from __future__ import annotations

import sys

_KINDS = (
    ("botocore.exceptions", "BotoCoreError"), ("botocore.exceptions", "ClientError"), ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"), ("google.auth.exceptions", "GoogleAuthError"), ("requests.exceptions", "RequestException"),
)  # fmt: skip


def client_errors() -> tuple[type[Exception], ...]:
    """Error types of those clients that are loaded: none of them is imported only for its errors."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _KINDS)
    return (OSError, ImportError, *(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)))


def s3_code(error: BaseException) -> str | None:
    """The S3 error code behind what s3fs raised, if there is one."""
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return None
    code = response.get("Error", {}).get("Code")
    return None if code is None else str(code)
