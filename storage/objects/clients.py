"""Which fsspec client opens a URL, and with what time-outs; owns the clients' own retries, which it turns off.

`storage/objects/retries.py` tries again in one place. The clients would each do so too, inside of one another (s3fs 5 times 5 times
botocore's 5), without a word and for minutes. What stays is aiohttp's: it sends a GET or PUT once more, at once, if the connection
that it had kept turns out to be closed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import fsspec

CONNECT_S = 5.0
"""Time-out of making a connection: a machine that doesn't answer by then isn't there."""

READ_S = 30.0
"""Time-out of waiting for more of a reply. A server may think this long about a large write before it answers."""

Kind = Literal["s3", "gcs", "memory", "other"]


@dataclass(frozen=True, slots=True)
class Client:
    """An fsspec file system, the path in it that stands for the URL, and how to talk to it."""

    fs: Any
    root: str
    kind: Kind


def open_client(url: str, options: Mapping[str, Any]) -> Client:
    """The client of `url`. What `options` say of time-outs and retries is kept. OSError, ImportError or the client's own errors."""
    try:
        return _open(url, options)
    except (TypeError, AttributeError, ValueError) as error:
        raise refusal(error, options) from error


def refusal(error: Exception, options: Mapping[str, Any]) -> OSError:
    """What a client stumbles over that is given options of names, types or values that it doesn't know; tells their names only."""
    names = ", ".join(sorted(map(str, options))) or "none"
    text = f": {error}"
    if any(value in text for value in _texts(options)):
        text = ""
    return OSError(errno.EINVAL, f"the client can't make use of this URL with these options ({type(error).__name__}{text}); options given: {names}")


def _texts(options: Mapping[str, Any]) -> Iterator[str]:
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _texts(value)
        else:
            yield str(value) or "''"


def _open(url: str, options: Mapping[str, Any]) -> Client:
    protocol = url.partition("://")[0]
    if protocol in {"s3", "s3a"}:
        fs = _s3_class()(**_s3_options(options))
        return Client(fs, _root(fs, url), "s3")
    if protocol in {"gs", "gcs"}:
        fs = _gcs_class()(**_gcs_options(options))
        return Client(fs, _root(fs, url), "gcs")
    fs, root = fsspec.core.url_to_fs(url, **options)
    return Client(fs, str(root).rstrip("/"), "memory" if protocol == "memory" else "other")


def _root(fs: Any, url: str) -> str:
    return str(fs._strip_protocol(url)).rstrip("/")


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        "connect_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        **(options.get("config_kwargs") or {}),
    }
    return {**options, "config_kwargs": config}


def _gcs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    import aiohttp

    return {"requests_timeout": aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S), **options}


@cache
def _s3_class() -> Any:
    import s3fs

    class OnceS3(s3fs.S3FileSystem):
        """s3fs that asks once."""

        retries = 1

    return OnceS3


@cache
def _gcs_class() -> Any:
    # gcsfs's default class asks each bucket over gRPC whether it is zonal, which takes a minute on a server without gRPC.
    from gcsfs.core import GCSFileSystem

    class OnceGCS(GCSFileSystem):
        """gcsfs that asks once."""

        _request = GCSFileSystem._request.__wrapped__

    return OnceGCS
