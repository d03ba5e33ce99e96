"""Statements of channels: a signed statement is read back, and each fault has its own error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from edgert.bundle.channel import (
    STATEMENT_BYTES_MAX,
    ChannelDevice,
    Entry,
    Statement,
    check_next,
    position,
    read_statement,
    sign_statement,
)
from edgert.bundle.envelope import CHANNEL_PAYLOAD_TYPE, sign
from edgert.bundle.expiry import expiry_time
from edgert.bundle.signing import SigningKey, new_key
from edgert.errors import ChannelExpired, ChannelInvalid, ChannelTooOld, SignatureInvalid

SHA = "ab" * 32
ENTRY = Entry("digits", 8, SHA, "cd" * 32, "ef" * 32, limits={"p99_ms": 8.0}, watch_s=600.0)
STATEMENT = Statement("stable", 7, "2026-11-22T08:00:00Z", "2026-12-22T08:00:00Z", (ENTRY,))
NOW_S = expiry_time("2026-11-23T08:00:00Z")
CAMERA = ChannelDevice("lab", "cam-1", "generic-x86", ("rack=3", "outdoors"))


def devices(count: int) -> list[ChannelDevice]:
    return [ChannelDevice("lab", f"cam-{number}", "generic-x86") for number in range(count)]


def test_a_signed_statement_is_read_back(signing_key: SigningKey) -> None:
    data = sign_statement(STATEMENT, signing_key)
    assert read_statement(data, "stable", (new_key().public, signing_key.public)) == STATEMENT


def test_a_statement_for_another_channel_is_refused(signing_key: SigningKey) -> None:
    with pytest.raises(ChannelInvalid, match="statement of channel stable for channel canary"):
        read_statement(sign_statement(STATEMENT, signing_key), "canary", (signing_key.public,))


def test_a_statement_of_a_foreign_key_is_refused_and_a_signed_manifest_in_its_place_is_refused(
    signing_key: SigningKey,
) -> None:
    with pytest.raises(SignatureInvalid, match="channel is signed by key"):
        read_statement(sign_statement(STATEMENT, new_key()), "stable", (signing_key.public,))
    with pytest.raises(ChannelInvalid):
        read_statement(sign(STATEMENT.to_bytes(), signing_key), "stable", (signing_key.public,))


def test_a_statement_with_too_many_bytes_is_refused(signing_key: SigningKey) -> None:
    with pytest.raises(ChannelInvalid, match="exceeds"):
        read_statement(b" " * (STATEMENT_BYTES_MAX + 1), "stable", (signing_key.public,))


def test_a_key_cannot_revoke_itself(signing_key: SigningKey) -> None:
    statement = replace(STATEMENT, revoked=(signing_key.public.key_id,))
    with pytest.raises(ChannelInvalid, match="cannot revoke itself"):
        sign_statement(statement, signing_key)
    forged = sign(statement.to_bytes(), signing_key, CHANNEL_PAYLOAD_TYPE)
    with pytest.raises(SignatureInvalid, match="revokes key"):
        read_statement(forged, "stable", (signing_key.public,))


def test_a_statement_with_a_lower_counter_is_refused() -> None:
    check_next(STATEMENT, 6, NOW_S)
    check_next(STATEMENT, 7, NOW_S)
    with pytest.raises(ChannelTooOld, match="counter 7, and 8 was seen"):
        check_next(STATEMENT, 8, NOW_S)


def test_a_statement_holds_from_its_begin_to_its_expiry() -> None:
    with pytest.raises(ChannelExpired, match="edgert channel renew stable"):
        check_next(STATEMENT, 0, expiry_time(STATEMENT.expires))
    later = replace(STATEMENT, not_before="2026-11-24T08:00:00Z")
    with pytest.raises(ChannelInvalid, match="starts at 2026-11-24"):
        check_next(later, 0, NOW_S)
    check_next(later, 0, expiry_time(later.not_before))


def test_a_device_whose_clock_is_behind_accepts_a_statement() -> None:
    check_next(STATEMENT, 0, 0.0)


def test_a_higher_share_only_adds_devices() -> None:
    fleet, before = devices(2000), set[str]()
    for share in (0.0, 0.05, 0.5, 1.0):
        selected = {each.device for each in fleet if replace(ENTRY, share=share).selects(each)}
        assert before <= selected
        assert abs(len(selected) - share * len(fleet)) < 100
        before = selected


def test_two_releases_reach_different_devices_first() -> None:
    def first(release: int) -> set[str]:
        return {each.device for each in devices(500) if position(each, "digits", release) < 0.1}

    assert first(8) != first(9)


@pytest.mark.parametrize(
    ("selectors", "selected"),
    [
        ({}, True),
        ({"sites": ("lab",)}, True),
        ({"sites": ("plant",)}, False),
        ({"profiles": ("jetson-orin", "generic-x86")}, True),
        ({"profiles": ("jetson-orin",)}, False),
        ({"tags": ("rack=3",)}, True),
        ({"tags": ("rack",)}, True),
        ({"tags": ("indoors",)}, False),
        ({"sites": ("lab",), "tags": ("indoors",)}, False),
    ],
)
def test_an_entry_selects_devices_by_site_or_by_profile_or_by_tag(selectors: dict[str, Any], selected: bool) -> None:
    assert replace(ENTRY, **selectors).selects(CAMERA) is selected


def test_a_device_takes_the_first_of_the_entries_that_select_it() -> None:
    new = replace(ENTRY, release=9, share=0.3)
    statement = replace(STATEMENT, entries=(new, ENTRY, replace(ENTRY, model="echo", release=1)))
    taken = {found.release for each in devices(100) if (found := statement.entry_for("digits", each))}
    assert taken == {8, 9}
    assert statement.models == ["digits", "echo"]
    assert statement.entry_for("unknown", CAMERA) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(format=2),
        lambda v: v.update(channel="Stable"),
        lambda v: v.update(counter=0),
        lambda v: v.update(counter=2**60),
        lambda v: v.update(counter="7"),
        lambda v: v.update(issued="yesterday"),
        lambda v: v.update(expires="2026-11-22T07:00:00Z"),
        lambda v: v.update(not_before="2027-11-22T07:00:00Z"),
        lambda v: v.pop("expires"),
        lambda v: v.update(hidden=1),
        lambda v: v.update(entries=v["entries"] * 300),
        lambda v: v.update(entries=5),
        lambda v: v.update(entries=[5]),
        lambda v: v.update(revoked=["all"]),
        lambda v: v["entries"][0].update(model="../digits"),
        lambda v: v["entries"][0].update(release=0),
        lambda v: v["entries"][0].update(digest="ab"),
        lambda v: v["entries"][0].update(envelope=SHA.upper()),
        lambda v: v["entries"][0].update(share=1.5),
        lambda v: v["entries"][0].update(watch_s=0),
        lambda v: v["entries"][0].update(attempt=0),
        lambda v: v["entries"][0].update(limits={"p99_ms": -1}),
        lambda v: v["entries"][0].update(limits={f"l{i}": 1 for i in range(20)}),
        lambda v: v["entries"][0].update(tags=[""]),
        lambda v: v["entries"][0].update(only="night"),
    ],
)
def test_a_statement_with_an_invalid_value_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(STATEMENT.to_bytes())
    change(value)
    with pytest.raises(ChannelInvalid):
        Statement.from_bytes(json.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format":1}'])
def test_bytes_that_are_not_a_statement_are_refused(data: bytes) -> None:
    with pytest.raises(ChannelInvalid):
        Statement.from_bytes(data)
