"""Parse HOST[:PORT] of brokers, devices and listeners, from options and from edgert.toml."""

from __future__ import annotations

import contextlib
from ipaddress import IPv6Address

from edgert.errors import ConfigInvalid

PORT_PLAIN = 1883  # MQTT's port without TLS
PORT_TLS = 8883
PORT_MAX = 65535


def host_and_port(text: str, default_port: int, *, port_min: int = 1) -> tuple[str, int]:
    """Split HOST, HOST:PORT, [IPV6] or [IPV6]:PORT, with or without mqtt://. Raises ConfigInvalid.

    mqtts:// is refused, because only the caller's own option turns TLS on. Without that option, the login would travel
    unencrypted.
    """
    plain = text.removeprefix("mqtt://")
    scheme, separator, _ = plain.partition("://")
    if separator:
        tls = "; --tls, --mqtt-tls or `tls = true` turns TLS on" if scheme == "mqtts" else ""
        raise ConfigInvalid(f"{text!r} is not an address: give HOST[:PORT] without {scheme}://{tls}")
    if plain.startswith("["):
        host, bracket, rest = plain[1:].partition("]")
        colon, port = rest[:1], rest[1:]
        valid = bracket and colon in ("", ":")
    elif plain.count(":") > 1:  # a bare IPv6 address
        host, colon, port, valid = plain, "", "", False
        with contextlib.suppress(ValueError):
            valid = bool(IPv6Address(plain))
    else:
        host, colon, port = plain.partition(":")
        valid = True
    odd = not host.isprintable() or " " in host or "/" in host
    if not valid or not host or odd or (colon and not (port.isascii() and port.isdecimal())):
        raise ConfigInvalid(f"{text!r} is not an address: give HOST[:PORT], and for IPv6 [ADDRESS]:PORT")
    if colon and not port_min <= int(port) <= PORT_MAX:
        raise ConfigInvalid(f"{text!r} has port {port}: give a port from {port_min} to {PORT_MAX}")
    return host, int(port) if colon else default_port
