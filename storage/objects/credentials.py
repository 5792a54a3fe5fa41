"""Which values are credentials, and texts without them; owns the names by which they are known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

_USER = re.compile(r"://[^/@]*@")
_SUSPECT = re.compile(r"key|secret|token|pass|cred|sas|auth|sign", re.IGNORECASE)
_CREDENTIAL = re.compile(r"(?:^|_)(?:key|token|passphrase|sas|credentials?)$|secret|password|passwd|connection_string|access_key", re.IGNORECASE)
_NO_SECRETS = frozenset({"anon", "browser", "cache", "cloud", "google_default"})
"""What gcsfs takes as a token and is the name of a way to get one."""


def values(options: Mapping[str, Any], *, inside: bool = False) -> Iterator[str]:
    """Every text in `options` that may be a credential, also as a URL spells it: rather too many than one too few."""
    for name, value in options.items():
        secret = inside or _SUSPECT.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from values(value, inside=secret)
        elif secret and isinstance(value, str) and len(value) > 3 and value not in _NO_SECRETS:
            yield from dict.fromkeys((value, quote(value), quote(value, safe=""), quote_plus(value)))


def credential_fields(options: Mapping[str, Any], path: str = "") -> list[str]:
    """The names, dotted, of the options that hold a credential itself: not the path of a file with one, nor the name of a way to get one."""
    found = []
    for name, value in options.items():
        here = f"{path}{name}"
        named = _CREDENTIAL.search(str(name)) is not None
        if isinstance(value, Mapping):
            found += [here] if named and value else credential_fields(value, f"{here}.")
        elif named and isinstance(value, str) and value and value not in _NO_SECRETS and not value.startswith(("/", "~", "./")):
            found.append(here)
    return found


def without_user(url: str) -> str:
    """A URL, or a text with URLs in it, without user and password."""
    return _USER.sub("://", url)
