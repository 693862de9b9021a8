"""What a sandbox has for a network: relays to fixed addresses, a name server without names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.agent_server.sandbox.lookups import ADDRESSES, Lookups
from miles_core.agent_server.sandbox.relay import Relay, listen_inside, socket_inside


class Network:
    """The sockets of this server in the network namespace of one sandbox."""

    def __init__(self) -> None:
        self._relays: list[Relay] = []
        self._lookups: Lookups | None = None

    async def open(
        self, pid: int, relays: list[tuple[int, str, int]], on_name: Callable[[str, int], None]
    ) -> None:
        """Open them in the namespaces of the process `pid`; raises SandboxError.

        `relays` are (port inside, host, port outside). `on_name` is told each public name that a
        program looks up, with the port that it asks from.
        """
        for inside, host, port in relays:
            relay = Relay(listen_inside(pid, inside), host, port)
            self._relays.append(relay)
            await relay.start()
        lookups = self._lookups = Lookups(on_name)
        try:
            names = socket_inside(pid, socket.SOCK_DGRAM, ADDRESSES[0])
        except SandboxError:  # a kernel without IPv6
            names = socket_inside(pid, socket.SOCK_DGRAM, ADDRESSES[1])
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: lookups, sock=names)

    def close(self) -> None:
        """Close them. Safe to call twice."""
        for relay in self._relays:
            relay.close()
        if self._lookups is not None:
            self._lookups.close()
