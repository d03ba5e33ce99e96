"""The address of the HTTP server."""

from __future__ import annotations

import pytest

from edgert.errors import ConfigInvalid
from edgert.http.address import parse_address


def test_an_address_that_other_machines_reach_needs_allow_remote() -> None:
    with pytest.raises(ConfigInvalid, match="allow_remote"):
        parse_address("0.0.0.0:8000", allow_remote=False)
    with pytest.raises(ConfigInvalid, match="allow_remote"):
        parse_address("[::]:8000", allow_remote=False)
    assert str(parse_address("0.0.0.0:8000", allow_remote=True)) == "0.0.0.0:8000"
    for text in ("127.0.0.1:8000", "[::1]:8000", "unix:/run/edgert-http.sock"):
        address = parse_address(text, allow_remote=False)
        assert address.is_local
        assert str(address) == text
    assert parse_address("localhost:80", allow_remote=False).host == "127.0.0.1"
    for text in ("", "8000", "example.com:80", "127.0.0.1:99999", "unix:relative", "unix:/" + "a" * 200):
        with pytest.raises(ConfigInvalid):
            parse_address(text, allow_remote=True)
