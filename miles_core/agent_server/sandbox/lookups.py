"""A name server inside a sandbox that knows no name and remembers who was asked for.

A sandbox has no network, so every program that wants the internet by name asks here first. The
answer is always SERVFAIL (RFC 1035, 4.1.1), which programs report as a failed name resolution.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, override

ADDRESSES = (("::1", 53), ("127.0.0.53", 53))
"""Where it may listen: the first that the kernel has. Over IPv6 a task can still start a name
server of its own on every IPv4 address."""

RESOLV_CONF = "".join(f"nameserver {host}\n" for host, _ in ADDRESSES)
RESOLV_CONF += "options timeout:1 attempts:1\n"

_HEADER = struct.Struct("!6H")
_RESPONSE, _KEPT, _SERVFAIL = 0x8000, 0x7900, 2
"""Flags of a header: the response bit, those of a query that are repeated, the code."""
_LOCAL = ("localhost", "sandbox", "local", "localdomain", "arpa", "internal", "test", "invalid")
_LABEL_LIMIT = 63


def question(packet: bytes) -> str | None:
    """The name that a DNS query asks for, in lower case; None for what is no query."""
    if len(packet) < _HEADER.size:
        return None
    _, flags, count, _, _, _ = _HEADER.unpack_from(packet)
    if flags & _RESPONSE or count != 1:
        return None
    labels, at = [], _HEADER.size
    while at < len(packet) and packet[at]:
        length = packet[at]
        if length > _LABEL_LIMIT or at + 1 + length >= len(packet):
            return None
        labels.append(packet[at + 1 : at + 1 + length].decode("ascii", "replace").lower())
        at += 1 + length
    return ".".join(labels) or None


def is_public(name: str) -> bool:
    """Whether a name could only be found in the internet."""
    labels = name.split(".")
    return len(labels) > 1 and labels[-1] not in _LOCAL


class Lookups(asyncio.DatagramProtocol):
    """Answers queries, and gives each public name to `on_name`, with the port that asks."""

    def __init__(self, on_name: Callable[[str, int], None]) -> None:
        self._on_name = on_name
        self._transport: asyncio.DatagramTransport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.DatagramTransport)
        self._transport = transport

    @override
    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        name = question(data)
        if name is None or self._transport is None:
            return
        if is_public(name):
            self._on_name(name, addr[1])
        number, flags, count, _, _, _ = _HEADER.unpack_from(data)
        answer = _HEADER.pack(number, _RESPONSE | flags & _KEPT | _SERVFAIL, count, 0, 0, 0)
        at = _HEADER.size
        while data[at]:
            at += 1 + data[at]
        self._transport.sendto(answer + data[_HEADER.size : at + 5], addr)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
