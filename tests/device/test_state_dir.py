"""The paths of a state folder and of a daemon's socket."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert.state_dir import SOCKET_PATH_BYTES_MAX, SYSTEM_SOCKET, StateDir, default_socket
from tests.support.accounts import as_nobody


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    assert StateDir(tmp_path).socket("") == tmp_path / "edgert.sock"
    with pytest.raises(ConfigInvalid, match="set a shorter `socket`"):
        StateDir(Path("/" + "x" * SOCKET_PATH_BYTES_MAX)).socket("")


def test_the_variable_for_the_socket_precedes_the_variable_for_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGERT_STATE", str(tmp_path))
    (tmp_path / "edgert.sock").touch()
    monkeypatch.delenv("EDGERT_SOCKET", raising=False)
    assert default_socket() == tmp_path / "edgert.sock"
    monkeypatch.setenv("EDGERT_SOCKET", "/elsewhere")
    assert default_socket() == Path("/elsewhere")


def test_storage_that_refuses_changes_counts_as_read_only_although_it_is_mounted_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer kernels show ext4 in this way after an error."""

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    assert not StateDir(tmp_path).read_only
    monkeypatch.setattr(os, "utime", refuse)
    assert StateDir(tmp_path).read_only


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_without_a_home_gets_the_socket_of_the_machine_and_must_name_a_state_folder() -> None:
    assert as_nobody("from edgert.state_dir import default_socket", "default_socket") == str(SYSTEM_SOCKET)
    said = as_nobody("from edgert.state_dir import default_state_dir", "default_state_dir")
    assert said.startswith("ConfigInvalid: this user has no home folder")
    assert said.endswith("Pass --state, or set HOME")
