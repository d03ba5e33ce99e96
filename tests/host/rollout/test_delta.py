"""Devices that lack the same files get the same delta, which is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey, new_key
from edgert_deploy.rollout import delta
from edgert_deploy.rollout.delta import Deltas, DeviceFiles
from tests.support.releases import bundle_of


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return new_key()


def test_the_same_device_files_give_the_same_delta(key: SigningKey, tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, key, 1)
    with open_bundle(bundle, None) as opened:
        target = opened.manifest.targets[0]
    one, again = (Deltas(tmp_path / "one").make(bundle, target, DeviceFiles(zstd=True)) for _ in range(2))
    elsewhere = Deltas(tmp_path / "two").make(bundle, target, DeviceFiles(zstd=True))
    assert one == again
    assert one.path.read_bytes() == elsewhere.path.read_bytes()


def test_a_full_cache_makes_no_delta(key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer then sends the whole bundle."""
    monkeypatch.setattr(delta, "CACHE_BYTES_MAX", 0)
    bundle = bundle_of(tmp_path, key, 1)
    with open_bundle(bundle, None) as opened:
        target = opened.manifest.targets[0]
    with pytest.raises(OSError, match="no room for it"):
        Deltas(tmp_path / "cache").make(bundle, target, DeviceFiles(zstd=True))
    assert not list((tmp_path / "cache").glob("*/*"))
