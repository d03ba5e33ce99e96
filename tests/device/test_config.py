"""The device's configuration: what is read, what is refused and how the error reads, and where sockets are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgert.config import (
    SOCKET_PATH_BYTES_MAX,
    SYSTEM_SOCKET,
    DeviceConfig,
    StateDir,
    default_socket,
    parse_config,
    read_config,
)
from edgert.errors import ConfigInvalid
from edgert.toml_file import read_toml
from tests.support.accounts import as_nobody

BASE = 'device = "pi-07"\nprofile = "raspberry-pi-5"\n'


def test_a_short_configuration_has_defaults_for_the_rest(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(BASE)
    config = read_config(StateDir(tmp_path))
    assert (config.device, config.site, config.serving.queue_max, config.mqtt.port) == ("pi-07", "default", 256, 1883)
    assert config.machine, "this machine's, where none is configured"


def test_a_file_that_begins_with_a_mark_of_utf_8_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(BASE, "utf-8-sig")
    assert read_config(StateDir(tmp_path)).device == "pi-07"
    assert read_toml(tmp_path / "config.toml")["device"] == "pi-07"


def test_every_table_is_read() -> None:
    text = (
        '[serving]\nthreads = 2\nallow_uids = [1000]\n[mqtt]\nhost = "b"\n[http]\nlisten = "x"\n[alarms]\ntemp_c = 70\n'
    )
    config = parse_config(BASE + text + "[models.digits]\npinned = true\n", "here")
    assert (config.serving.threads, config.serving.allow_uids) == (2, (1000,))
    assert (config.mqtt.host, config.http.listen, config.alarms.temp_c) == ("b", "x", 70)
    assert (config.model("digits").pinned, config.model("other").pinned) == (True, False)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("device = ", "is not TOML"),
        (BASE + "colour = 1", "unknown key 'colour'"),
        (BASE + "[serving]\nthreads = true", "serving.threads is True, not of type int"),
        (BASE + "[serving]\nthreads = -1", "threads is -1; give 0 to 1024"),
        (BASE + "[serving]\ninstances = -1", "instances is -1; give 0 to 1024"),
        (BASE + '[serving]\nobjective = "speed"', "objective is 'speed'"),
        (BASE + '[serving]\nallow_uids = ["root"]', r"allow_uids\[0\] is 'root'"),
        (BASE + "[alarms]\nerror_share = 2.0", "error_share is 2.0"),
        (BASE + "[models.m]\nnear = 1.5", "near is 1.5"),
        (BASE + '[mqtt]\nhome_assistant = "a b"', "home_assistant is 'a b'"),
        (BASE + "models = 5", "models is 5, not an object"),
        (BASE + "[models]\ndigits = 1", "digits"),
        (BASE + "[models.digits]\npined = true", "pined"),
        ('device = "7"\nprofile = "p"', "reads as a number"),
        ('device = "d"', "profile"),
    ],
)
def test_a_wrong_value_is_named(text: str, error: str) -> None:
    with pytest.raises(ConfigInvalid, match=error):
        parse_config(text, "here")


def test_a_missing_file_names_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="run edgert bootstrap"):
        read_config(StateDir(tmp_path))


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    config = DeviceConfig("d", "p")
    assert StateDir(tmp_path).socket(config) == tmp_path / "edgert.sock"
    with pytest.raises(ConfigInvalid, match="set a shorter `socket`"):
        StateDir(Path("/" + "x" * SOCKET_PATH_BYTES_MAX)).socket(config)


def test_the_environment_names_the_socket_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGERT_STATE", str(tmp_path))
    (tmp_path / "edgert.sock").touch()
    monkeypatch.delenv("EDGERT_SOCKET", raising=False)
    assert default_socket() == tmp_path / "edgert.sock"
    monkeypatch.setenv("EDGERT_SOCKET", "/elsewhere")
    assert default_socket() == Path("/elsewhere")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_without_a_home_finds_the_socket_of_the_machine_and_names_a_state_folder() -> None:
    assert as_nobody("from edgert.config import default_socket", "default_socket") == str(SYSTEM_SOCKET)
    said = as_nobody("from edgert.config import default_state_dir", "default_state_dir")
    assert said.startswith("ConfigInvalid: this user has no home folder")
    assert said.endswith("Pass --state, or set HOME")
