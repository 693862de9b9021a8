"""Who may ask: the same rules for both ports of the server.

A browser sends requests for any page that it shows. A page whose own name was made to resolve to
this machine (DNS rebinding) is known by the `Host` header, which has that name; a page of another
site is known by the `Origin` header, which browsers add to whatever changes something.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from miles_core.agent_server.answers import Refused, error_answer

READING = frozenset({"GET", "HEAD", "OPTIONS"})


class OwnCallers:
    """ASGI middleware: refuses, with 403, what a web page elsewhere may have sent.

    A request that changes something must have no `Origin` or one that is its own `Host`. Without a
    bearer token every request must name this machine's loopback or `bound`, the address that the
    server listens on, in `Host`; the port may be any, as behind a forwarded one.
    """

    def __init__(self, app: ASGIApp, token: str | None, bound: str) -> None:
        self._app = app
        self._open = token is None
        self._bound = bound

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await error_answer(403, *problem)(scope, receive, send)

    def _problem(self, scope: Scope) -> tuple[str, str] | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._open and not self._ours(host):
            names = "localhost, 127.0.0.1 or [::1]"
            if not is_loopback(self._bound):
                names += f" or {self._bound}"
            message = f"Host is {host[:80]!r}; a server without a bearer token answers to {names}"
            return "forbidden_host", f"{message} alone: ask for one, or set HARBOR_ADMIN_SECRET"
        if scope["method"] in READING or origin is None:
            return None
        if origin.partition("://")[2].lower() == host.lower() != "":
            return None
        message = f"a page of {origin[:80]!r} may change nothing here"
        return "forbidden_origin", f"{message}: the request comes from another site's web page"

    def _ours(self, host: str) -> bool:
        name = host_name(host)
        return is_loopback(name) or name == self._bound.lower()


def host_name(host: str) -> str:
    """The name in a Host header, without its port and the brackets of an IPv6 address."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.removeprefix("[").removesuffix("]").lower()


def is_loopback(name: str) -> bool:
    """Whether a host name can only mean this machine."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def bearer(token: str | None) -> Callable[[Request], Awaitable[None]]:
    """A check of a request's bearer token; without a token every request passes."""

    async def authorised(request: Request) -> None:
        if token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise Refused(401, "unauthorized", "this route needs the server's bearer token")

    return authorised
