"""Which run it is, where its folder lies, and for how long it waits."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rollart.config.section import Section
from storage.objects.credentials import credential_fields, without_user

_CREDENTIALS = (
    "take it out, and give it by the environment or the usual files (AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws/credentials, "
    "GOOGLE_APPLICATION_CREDENTIALS), on every machine of the run"
)


class RunSettings(Section):
    """Which run this is and where its folder lies."""

    root: str = Field("runs", min_length=1, description="folder that holds the runs: a path or any fsspec URL (s3://bucket/runs)")
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run's name; default: the flow and the time")
    storage_options: dict[str, Any] = Field(
        default_factory=dict, description="fsspec options of `root` (never credentials: they come from the environment)"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="every seed of the run follows from it")
    deterministic: bool = Field(False, description="equal runs are equal bit for bit; needs alpha 0, fp32 and the embedded engine, and is slow")
    dashboard_port: int = Field(8787, ge=0, le=65535, description="port of the Dask dashboard; 0 takes any free one")
    scheduler: str | None = Field(None, description="address of a running Dask scheduler; default: a local cluster is started")
    step_timeout: float = Field(
        900.0, gt=0, description="seconds without any trajectory, step or version after which the run fails and says what it awaits"
    )
    lease: float = Field(
        15.0, ge=1, description="seconds for which a process that runs the run may be silent before another one may take the run over"
    )

    @field_validator("root")
    @classmethod
    def _no_user(cls, root: str) -> str:
        if without_user(root) != root:
            raise ValueError(f"a URL with a user or password would be kept in the run's folder; {_CREDENTIALS}")
        return root

    @field_validator("storage_options")
    @classmethod
    def _no_credentials(cls, options: dict[str, Any]) -> dict[str, Any]:
        if found := credential_fields(options):
            raise ValueError(f"{', '.join(found)}: a credential would be kept in the run's folder; {_CREDENTIALS}")
        return options
