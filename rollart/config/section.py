"""What every section of the configuration is; knows no field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """The configuration can't be used; the message is one line a problem, each with the field's path and a remedy."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, and so are numbers that are not finite; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
