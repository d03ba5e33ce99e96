"""HOST[:PORT] of an MQTT broker, as options and edgert.toml have it."""

from __future__ import annotations

from edgert.errors import ConfigInvalid

PORT_PLAIN = 1883
PORT_TLS = 8883
PORT_MAX = 65535


def host_and_port(broker: str, default_port: int) -> tuple[str, int]:
    """Take HOST, HOST:PORT, [IPV6] or [IPV6]:PORT apart. Raises ConfigInvalid."""
    text = broker.removeprefix("mqtt://").removeprefix("mqtts://")
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:  # a bare IPv6 address
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or (port and not port.isdecimal()):
        raise ConfigInvalid(f"--broker {broker!r} is not HOST or HOST:PORT; for IPv6 write [ADDRESS]:PORT")
    if port and int(port) > PORT_MAX:
        raise ConfigInvalid(f"--broker {broker!r} has port {port}; give one up to {PORT_MAX}")
    return host, int(port or default_port)
