"""`edgert init` makes a project once and overwrites no file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import find_inventory
from tests.support.devices import nothing_may_be_written

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a user's configuration beside it."""
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    (tmp_path / "fleet").mkdir()
    monkeypatch.chdir(tmp_path / "fleet")
    return tmp_path / "fleet"


def init(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["init", *words, "--json"]) == code
    value: dict[str, Any] = json.loads(capfd.readouterr().out)
    return value


def test_init_creates_a_project_once_and_overwrites_no_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = init(capfd)
    assert made["made"][:3] == ["edgert.toml", "inventory.toml", ".gitignore"]
    key = folder.parent / "conf" / "keys" / "default.key.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert made["made"][3:] == [str(key), "keys/default.pem"]
    before = {path: path.read_bytes() for path in (*files, key)}
    again = init(capfd)
    assert (again["made"], again["stayed"]) == ([], made["made"][:3])
    assert {path: path.read_bytes() for path in (*files, key)} == before
    assert not any(b"PRIVATE" in content for path, content in before.items() if path != key)
    assert main(["device", "add", "here", "--local", "dev"]) == 0
    assert [d.name for d in find_inventory(folder / "inventory.toml").devices()] == ["here"]


def test_init_on_a_full_disk_leaves_no_empty_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with nothing_may_be_written():  # a separate process, because pytest stores the output in files
        words = [sys.executable, "-c", "import sys; from edgert_deploy.cli import main; sys.exit(main(['init']))"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=60)
    assert (done.returncode, list(folder.iterdir())) == (4, [])
    assert "edgert.toml: " in done.stderr
    assert init(capfd)["stayed"] == []


def test_init_in_a_folder_that_was_removed_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["init"]) == 4
    assert "cannot make . a project: .: No such file or directory" in capfd.readouterr().err


def test_init_keeps_existing_files_and_names_the_lines_that_they_lack(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / ".gitignore").write_text("mine\n")
    assert main(["device", "add", "old", "--local", "dev"]) == 0
    assert main(["init", "sub"]) == 0
    told = capfd.readouterr().err
    assert "*.key.pem" in told
    assert f"so far are in {folder.parent / 'conf' / 'inventory.toml'}" in told
    assert (folder / "sub" / ".gitignore").read_text() == "mine\n"
    (folder / "sub" / "edgert.toml").write_text("colour = 'red'\n")
    assert "unknown key 'colour'" in init(capfd, "sub", code=4)["error"]["message"]
    (folder / "file").touch()
    assert init(capfd, "file/below", code=4)["error"]["code"] == "input.config_invalid"
