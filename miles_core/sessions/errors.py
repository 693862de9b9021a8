"""Errors that an agent sees, in OpenAI's shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error answer: HTTP status, code, text, and the field of the request that it is about."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def session_gone() -> ApiError:
    """The session was deleted, has expired, or never was."""
    return ApiError(404, "session_not_found", "there is no such session")


def session_lost() -> ApiError:
    """The session's server ends, or died, while the session was open."""
    return ApiError(
        410, "session_lost", "the session server has ended: this session can only be read"
    )
