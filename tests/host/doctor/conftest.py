"""Devices and a host for the doctor's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert_deploy.devices.inventory import Inventory
from tests.support import devices
from tests.support.commands import own_key
from tests.support.devices import a_device


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """An empty fleet and a signing key in the test's own configuration, without an agent and ~/.ssh."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    own_key(tmp_path)
    return Inventory(tmp_path / "conf" / "inventory.toml")


@pytest.fixture(scope="module")
def daemon() -> Iterator[devices.Device]:
    with a_device() as device:
        device.deploy()
        yield device
