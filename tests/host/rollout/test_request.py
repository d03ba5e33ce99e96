"""This host verifies a bundle before it deploys the bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.bundle.signing import new_key
from edgert.errors import BundleCorrupt
from edgert_deploy.rollout.request import read_offer
from tests.support.bundles import flip_bit, make_null_bundle


def test_a_damaged_bundle_is_refused_on_this_host(tmp_path: Path) -> None:
    good = make_null_bundle(tmp_path, new_key(), padding_bytes=4000)
    for offset in (-2000, -5000, 30):
        with pytest.raises(BundleCorrupt):
            read_offer(flip_bit(good, offset))
