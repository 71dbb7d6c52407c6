"""Step 2 of an image's way, if it names a host that is allowed: a connection to a public address only.

A name that a stranger chooses may have an address of the local network, and another one at each look. So the addresses
of a name are looked up once, and the connection goes to one that was checked. vLLM: `allowed_media_domains` without
this check, and advice to use a firewall.
"""

import socket
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any

TRANSLATED = IPv6Network("64:ff9b::/96")
"""Addresses whose last four bytes are an IPv4 address that a gateway connects to (RFC 6052)."""


def connect_to_public(address: tuple[str, int], timeout: float, source_address: Any) -> socket.socket:
    """Return a connection to (host, port), as `socket.create_connection`. Raises `OSError` if no address is public."""
    error = OSError(f"{address[0]} has no public address")
    for _, _, _, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        if is_public(str(place[0])):
            try:
                return socket.create_connection((str(place[0]), address[1]), timeout, source_address)
            except OSError as failed:
                error = failed
    raise error


def is_public(text: str) -> bool:
    """Return whether an address belongs to the public internet, and not to a network of this machine's."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is not None or address in TRANSLATED:
            return is_public(str(inner or ip_address(int(address) % 2**32)))
    return address.is_global and not address.is_multicast
