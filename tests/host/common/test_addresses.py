"""The parser of HOST[:PORT] accepts and refuses the documented forms."""

from __future__ import annotations

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.common.addresses import host_and_port


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1", ("10.0.0.1", 1883)),
        ("broker:1884", ("broker", 1884)),
        ("mqtt://broker:1884", ("broker", 1884)),
        ("[fe80::1]:8883", ("fe80::1", 8883)),
        ("[fe80::1]", ("fe80::1", 1883)),
        ("fe80::1%eth0", ("fe80::1%eth0", 1883)),
    ],
)
def test_a_text_is_split_into_host_and_port(text: str, found: tuple[str, int]) -> None:
    assert host_and_port(text, 1883) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", ":1883", "broker:", "broker:x", "broker:٣", "[fe80::1", "[fe80::1]x", "[]:1", "a:1:2"),
        *(" ", "broker ", " broker:1883", "my broker", "broker\n", "broker\x1b[2J", "broker/edgert", "mqtt:///broker"),
    ],
)
def test_a_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="is not an address"):
        host_and_port(text, 1883)


def test_an_address_of_another_protocol_is_refused_so_that_no_login_goes_without_tls() -> None:
    for text, said in (("mqtts://broker", "without mqtts://; --tls"), ("http://10.0.0.1:1883", "without http://$")):
        with pytest.raises(ConfigInvalid, match=said):
            host_and_port(text, 1883)


def test_a_port_outside_the_limits_is_refused() -> None:
    for text in ("broker:0", "broker:65536"):
        with pytest.raises(ConfigInvalid, match="give a port from 1 to 65535"):
            host_and_port(text, 1883)
    assert host_and_port("127.0.0.1:0", 1883, port_min=0) == ("127.0.0.1", 0)
