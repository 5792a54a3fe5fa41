"""What can be wrong with a draft."""

from __future__ import annotations

__all__ = ["DraftError"]


class DraftError(ValueError):
    """A draft doesn't fit the model that it drafts for, or its folder is no draft's; the message names what differs."""
