"""The commands that change a model's slots, on a device without this model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgert.cli import main


@pytest.mark.parametrize("command", ["mark-good", "rollback", "trial", "check", "activate"])
def test_a_folder_without_a_device_is_distinguished_from_a_device_without_the_model(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--state", str(tmp_path / "typo"), command, "digits", "--json"]) == 7
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert message.startswith(f"{tmp_path}/typo/config.toml is missing")
    (tmp_path / "config.toml").write_text('device = "d"\nprofile = "p"\n')
    assert main(["--state", str(tmp_path), command, "digits", "--json"]) == 8
    assert "this device has: none" in json.loads(capsys.readouterr().out)["error"]["message"]
