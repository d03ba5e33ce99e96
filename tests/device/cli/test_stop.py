"""`edgertd stop` without a daemon. tests/end_to_end stops daemons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgert.cli import main


def test_stop_refuses_a_folder_without_a_device_and_accepts_the_folder_of_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path / "typo", tmp_path):
        assert main(["--state", str(folder), "stop", "--json"]) == 7
        message = json.loads(capsys.readouterr().out)["error"]["message"]
        assert message.startswith(f"{folder}/config.toml is missing")
        assert message.endswith("or give --state")
    (tmp_path / "config.toml").write_text("damaged")
    assert main(["--state", str(tmp_path), "stop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": False}
