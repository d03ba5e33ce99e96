from __future__ import annotations

import errno
import gc
from pathlib import Path

import click
import pytest

from edgert.cli import edgertd
from edgert.cli.command import EXIT_OS_ERROR, LazyGroup, main_with_errors


def test_the_garbage_collector_is_on_after_the_import_of_a_command_and_after_a_failed_one() -> None:
    assert edgertd.get_command(click.Context(edgertd), "status") is not None
    assert gc.isenabled()
    group = LazyGroup(commands_by_name={"lost": ("edgert.cli.lost:lost", "")})
    with pytest.raises(ModuleNotFoundError):
        group.get_command(click.Context(group), "lost")
    assert gc.isenabled()


def test_a_user_without_access_gets_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def command() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/state/models")

    assert main_with_errors(command, []) == EXIT_OS_ERROR
    assert capsys.readouterr().err == "error: /state/models: Permission denied; run this as the owner, or as root\n"


def test_a_removed_working_folder_is_named_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PWD", str(gone))
    gone.rmdir()
    assert main_with_errors(click.Command("command", callback=Path.cwd), []) == EXIT_OS_ERROR
    assert capsys.readouterr().err == (
        f"error: the working folder {gone} was removed: change to an existing folder, then run this again "
        "(No such file or directory)\n"
    )
