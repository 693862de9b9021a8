"""What sandboxes are told: the given name, the node's external one, its own; not what is bound."""

from __future__ import annotations

import pytest

from miles_core.cluster.addresses import session_host
from miles_core.config.schema import SessionsConfig
from miles_core.serving import url_of

OWN = "192.0.2.7"


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "::", "10.1.2.3", "::1", "localhost"])
@pytest.mark.parametrize("node", [None, "198.51.100.9"])
@pytest.mark.parametrize("given", [None, "sessions.example"])
def test_the_order(bound: str, node: str | None, given: str | None) -> None:
    sessions = SessionsConfig(miles_host_ip=bound, session_server_external_host=given)
    environment = {"MILES_NODE_EXTERNAL_IP": node} if node else {}
    local = bound in ("127.0.0.1", "::1", "localhost")
    expected = given or node or (None if local else OWN)
    assert session_host(sessions, environment, lambda: OWN) == expected


def test_a_server_on_every_address_is_reached_on_loopback() -> None:
    assert url_of("0.0.0.0", 5) == "http://127.0.0.1:5"
    assert url_of("::", 5) == "http://[::1]:5"
    assert url_of("10.1.2.3", 5) == "http://10.1.2.3:5"
