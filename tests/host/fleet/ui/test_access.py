"""Loopback is open to all users, other addresses only to users with the token. Other sites are refused."""

from __future__ import annotations

import pytest

from edgert_deploy.fleet.ui.access import Access, is_loopback, new_token

TOKEN = new_token()
BEYOND = Access(frozenset({"fleet.lan"}), TOKEN, "edgert")


@pytest.mark.parametrize(
    ("host", "own"),
    [("localhost", True), ("LOCALHOST", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False), ("", False)],
)
def test_loopback_is_known_by_name_and_address(host: str, own: bool) -> None:
    assert is_loopback(host) == own


def test_an_ip_address_is_accepted_as_a_host_only_if_a_token_is_required() -> None:
    assert BEYOND.refusal("GET", {"host": "10.0.0.1:8080"}) is None
    assert "--name" in (Access(BEYOND.names).refusal("GET", {"host": "10.0.0.1:8080"}) or "")
    assert "'evil.example'" in (BEYOND.refusal("GET", {"host": "evil.example"}) or "")
    assert BEYOND.refusal("GET", {"host": "fleet.lan"}) is None


def test_a_request_without_a_host_is_refused() -> None:
    assert BEYOND.refusal("GET", {}) is not None


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({"authorization": f"Bearer {TOKEN}"}, True),
        ({"authorization": f"bearer {TOKEN}"}, True),
        ({"authorization": TOKEN}, False),
        ({"authorization": f"Basic {TOKEN}"}, False),
        ({"cookie": f"a=b;edgert={TOKEN}"}, True),
        ({"cookie": f"other={TOKEN}"}, False),
        ({"cookie": "edgert"}, False),
        ({"authorization": "Bearer \u00e9"}, False),
        ({}, False),
    ],
)
def test_the_token_is_accepted_as_a_bearer_or_in_the_own_cookie(headers: dict[str, str], known: bool) -> None:
    """The name of the scheme has no case (RFC 9110, section 11.1)."""
    assert BEYOND.knows_token(headers) == known
    assert Access(frozenset()).knows_token(headers), "without a token, none is asked for"
