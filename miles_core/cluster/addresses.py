"""Under which name a sandbox reaches the session servers of this node."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping

from miles_core.config.schema import SessionsConfig

NODE_EXTERNAL_IP = "MILES_NODE_EXTERNAL_IP"


def session_host(
    sessions: SessionsConfig, environment: Mapping[str, str], own_address: Callable[[], str]
) -> str | None:
    """The host that agents are given; None: the one that the servers are bound to.

    In this order: `sessions.session_server_external_host`, MILES_NODE_EXTERNAL_IP of this node, the
    node's own address. `miles_host_ip` is what the servers bind: only loopback is given to agents.
    """
    given = sessions.session_server_external_host or environment.get(NODE_EXTERNAL_IP)
    if given or _is_loopback(sessions.miles_host_ip):
        return given
    return own_address()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
