"""What a request is answered with where it is not served, in OpenAI's form; decides nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "bad_request"]


class ApiError(Exception):
    """A request that is not served: an HTTP `status` (4xx where the agent is at fault, 5xx where an engine is), and OpenAI's `code` and `param`."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A mistake in the request's body, of which `param` is the path of the field."""
    return ApiError(400, message, param=param, code=code)
