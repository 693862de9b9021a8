"""Where an agent finds the model, seen from this host and from inside a bubblewrap sandbox."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from miles_core.agent_server.sandbox.relay import INSIDE_HOST


def relayed(base_url: str) -> tuple[int, str, int]:
    """The relay that an address needs: (port inside, host, port); raises ValueError."""
    url = urlsplit(base_url)
    if url.scheme != "http" or not url.hostname:
        raise ValueError("it must be http://HOST:PORT/... for a relay into the sandbox")
    port = _port(url)
    return port, url.hostname, port


def inside(base_url: str) -> str:
    """The same address through the relay of a sandbox, which has no other host than itself."""
    url = urlsplit(base_url)
    return url._replace(netloc=f"{INSIDE_HOST}:{_port(url)}").geturl()


def _port(url: SplitResult) -> int:
    return url.port or 80
