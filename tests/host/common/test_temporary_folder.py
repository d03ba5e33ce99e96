"""Temporary folders are removed, at the latest by the next command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgert_deploy.common.temporary_folder import temporary_folder


def test_the_folder_of_a_killed_command_is_removed_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders of running commands and of other programs stay."""
    program = (
        "import time\nfrom edgert_deploy.common.temporary_folder import temporary_folder\n"
        "with temporary_folder('publish') as folder:\n (folder / 'parts').mkdir()\n print(folder, flush=True)\n time.sleep(600)"
    )
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    (other := tmp_path / "edgert-bench-1").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with commands[0] as killed, commands[1] as running:
        try:
            gone, used = (Path(command.stdout.readline().strip()) for command in commands if command.stdout)
            killed.kill()
            killed.wait()
            with temporary_folder("build") as folder:
                assert set(tmp_path.iterdir()) == {other, used, folder}, gone
        finally:
            running.kill()
