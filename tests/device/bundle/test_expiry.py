"""Expiry: the forms of a time, and an expired bundle that a host does not send."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.bundle.expiry import check_expiry, expiry_time
from edgert.bundle.signing import SigningKey
from edgert.errors import BundleExpired
from edgert_deploy.rollout.request import read_offer
from tests.support.bundles import make_null_bundle

NOW_S = expiry_time("2026-11-21T08:00:00Z")


def test_a_bundle_is_expired_from_the_second_of_its_expiry() -> None:
    check_expiry("2026-11-21T08:00:00Z", "it", NOW_S - 1)
    check_expiry("", "it", NOW_S)
    with pytest.raises(BundleExpired, match="Build it again, with a later --expires"):
        check_expiry("2026-11-21T08:00:00Z", "it", NOW_S)


def test_a_host_refuses_to_send_an_expired_bundle(tmp_path: Path, signing_key: SigningKey) -> None:
    with pytest.raises(BundleExpired, match="release 1 of echo"):
        read_offer(make_null_bundle(tmp_path, signing_key, expires="2020-01-01T00:00:00Z"))
