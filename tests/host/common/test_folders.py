"""The folders of a user's keys, caches and reports follow the XDG specification."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.common.folders import cache_folder, config_folder, state_folder
from tests.support.accounts import as_nobody

FOLDERS = {
    "XDG_CONFIG_HOME": (config_folder, ".config"),
    "XDG_CACHE_HOME": (cache_folder, ".cache"),
    "XDG_STATE_HOME": (state_folder, ".local/state"),
}


@pytest.mark.parametrize("variable", FOLDERS)
def test_a_folder_follows_its_variable_unless_the_variable_is_relative(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, below_home = FOLDERS[variable]
    monkeypatch.delenv("EDGERT_CONFIG_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv(variable, ignored)
        assert folder() == tmp_path / below_home / "edgert"
    monkeypatch.setenv(variable, str(tmp_path / "mine"))
    assert folder() == tmp_path / "mine/edgert"


def test_the_variable_of_edgert_precedes_the_general_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "theirs"))
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "ours"))
    assert config_folder() == tmp_path / "ours"


def test_a_relative_home_is_refused_for_every_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """In older versions, the host used such a home below the current folder, and the device refused it."""
    monkeypatch.delenv("EDGERT_CONFIG_DIR", raising=False)
    monkeypatch.setenv("HOME", "relative/home")
    for variable, (folder, _) in FOLDERS.items():
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(ConfigInvalid, match=rf"\$HOME is 'relative/home', which .*\. Set HOME or {variable}$"):
            folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_the_error_for_a_user_without_a_home_names_the_variable_to_set() -> None:
    """An example is `docker run --user 54321`."""
    said = as_nobody("from edgert_deploy.common.folders import config_folder", "config_folder")
    assert said.startswith(
        "ConfigInvalid: this user has no home folder: $HOME is not set, and user 54321 has no account"
    )
    assert said.endswith("Set HOME or XDG_CONFIG_HOME")
