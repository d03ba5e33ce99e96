"""Fixtures of the tests of commands: an sshd, an empty fleet, a local device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert_deploy.devices.inventory import Inventory
from tests.support.bundles import make_null_bundle
from tests.support.commands import Edgert, own_key, stop


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """An empty fleet in the test's own configuration folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Inventory(tmp_path / "conf" / "inventory.toml")


@pytest.fixture
def edgert(capfd: pytest.CaptureFixture[str], edgertd_is_forked: None) -> Edgert:
    return Edgert(capfd)


@pytest.fixture
def here(edgert: Edgert, inventory: Inventory, tmp_path: Path) -> Iterator[Path]:
    """Add a local device `here`, not bootstrapped yet. Return a folder with three bundles of the user's key."""
    key = own_key(tmp_path)
    assert edgert("device", "add", "here", "--local", "dev")[0] == 0
    for release in (1, 2, 3):
        make_null_bundle(tmp_path / "b", key, release=release)
    yield tmp_path / "b"
    stop(tmp_path / "dev")
