"""Only the user has the private half of a key; the project also has the public half. Errors give the next step."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path

import pytest

from edgert.bundle.signing import new_key
from edgert.errors import ConfigInvalid
from edgert_deploy.cli import main
from edgert_deploy.common.keys import is_key_file, key_paths, keys_dir, public_key, public_keys, publish, signing_key
from edgert_deploy.common.project import find_project


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's keys, without a project."""
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    monkeypatch.chdir(tmp_path)
    return keys_dir()


def test_a_key_is_read_by_its_name_or_its_file(folder: Path) -> None:
    assert main(["keys", "new", "--name", "lab"]) == 0
    private, public = key_paths(folder, "lab")
    assert signing_key("lab").public.pem() == signing_key(str(private)).public.pem() == public.read_bytes()
    assert is_key_file(str(private))
    assert not is_key_file("lab")


def test_a_key_that_other_users_can_read_signs_nothing(folder: Path) -> None:
    assert main(["keys", "new", "--name", "lab"]) == 0
    private = key_paths(folder, "lab")[0]
    for mode in (0o644, 0o640, 0o602):
        private.chmod(mode)
        for given in ("lab", str(private)):
            with pytest.raises(ConfigInvalid, match=rf"\(mode {mode:o}\).*: chmod 600 {private}"):
                signing_key(given)
    private.chmod(0o400)
    assert signing_key("lab")


def test_a_missing_key_is_reported_with_the_keys_that_exist() -> None:
    with pytest.raises(ConfigInvalid, match=r"edgert keys new$"):
        signing_key(None)
    assert main(["keys", "new", "--name", "lab"]) == 0
    with pytest.raises(ConfigInvalid, match="choose with --key lab"):
        signing_key("plant")
    with pytest.raises(ConfigInvalid, match="edgert keys new --name plant"):
        public_key("plant")


def test_a_public_half_that_is_missing_is_written_again(folder: Path) -> None:
    assert main(["keys", "new", "--name", "lab"]) == 0
    public = key_paths(folder, "lab")[1]
    content = public.read_bytes()
    public.unlink()
    assert public_key("lab").read_bytes() == content
    assert public_keys() == [public.resolve()]


def test_a_full_disk_leaves_no_incomplete_key_in_the_project(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "edgert.toml").touch()
    public = tmp_path / "lab.pem"
    public.write_bytes(new_key().public.pem())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ConfigInvalid, match="copy the file"):
            publish(public, find_project(tmp_path / "fleet"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "fleet" / "keys").iterdir()) == []


def test_several_commands_may_publish_a_key_at_once(folder: Path, tmp_path: Path) -> None:
    """In older versions, the jobs of a pipeline removed each other's unfinished copy."""
    assert main(["keys", "new"]) == 0
    (tmp_path / "edgert.toml").touch()
    project, public = find_project(), key_paths(folder, "default")[1]

    def publish_often() -> None:
        for _ in range(100):
            (project.public_keys / public.name).unlink(missing_ok=True)
            publish(public, project)

    processes = [multiprocessing.get_context("fork").Process(target=publish_often) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
