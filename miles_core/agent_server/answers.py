"""The one form of the answers of both ports that are errors: `{"error": {"code", "message"}}`."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

MESSAGE_LIMIT = 500

_CODES = {400: "bad_request", 404: "unknown_route", 405: "method_not_allowed"}
"""Codes of what the framework refuses before a route of ours is asked."""


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def error_answer(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error as it is sent; the message is one line for a person."""
    text = " ".join(message.split()).encode("utf-8", "replace").decode()[:MESSAGE_LIMIT]
    content = {"error": {"code": code, "message": text}}
    return JSONResponse(content, status_code=status, headers=dict(headers or {}))


def _is_json(content_type: str) -> bool:
    """Whether a body with this header is read as JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _shown(content_type: str) -> str:
    return f"is {content_type[:80]!a}" if content_type else "there is none"


def set_errors(app: FastAPI) -> None:
    """Give every error of an application the one form, those of the framework too."""

    @app.exception_handler(Refused)
    async def on_refused(request: Request, error: Refused) -> JSONResponse:
        return error_answer(error.status, error.code, error.message)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_answer(400, "not_json", "the body is not JSON")
        kind = request.headers.get("content-type", "")
        if first["loc"] == ("body",) and not _is_json(kind):
            told = "content-type: it must be application/json"
            return error_answer(422, "invalid_request", f"{told}, and {_shown(kind)}")
        place = ".".join(str(part) for part in first["loc"])
        return error_answer(422, "invalid_request", f"{place}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def on_framework(request: Request, error: HTTPException) -> JSONResponse:
        asked = f"{request.method} {request.url.path[:200]}"
        told = {
            400: "the body is not JSON that can be read",
            404: f"there is no {asked}",
            405: f"{asked}: the route has no such method",
        }
        code = _CODES.get(error.status_code, "error")
        message = told.get(error.status_code, str(error.detail))
        return error_answer(error.status_code, code, message, error.headers)

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> JSONResponse:
        """The server's log has the traceback; its words may hold what no answer should."""
        message = f"a fault of this server ({type(error).__name__}); its log has more"
        return error_answer(500, "internal_error", message)
