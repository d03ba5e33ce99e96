"""The device's configuration: accepted and refused keys, the errors, and the paths of sockets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgert.config import parse_config, read_config
from edgert.errors import ConfigInvalid, NotBootstrapped
from edgert.state_dir import StateDir
from edgert.toml_file import read_toml

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


def test_a_file_that_the_system_does_not_read_is_named_with_the_reason_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(ConfigInvalid, match=rf"^{tmp_path}/config.toml cannot be read: Is a directory$"):
        read_config(StateDir(tmp_path))


def test_a_named_pipe_or_a_device_is_refused(tmp_path: Path) -> None:
    """A read of it may not end."""
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigInvalid, match="use a regular file"):
        read_config(StateDir(tmp_path))
    (tmp_path / "config.toml").unlink()
    (tmp_path / "config.toml").symlink_to("/dev/zero")
    with pytest.raises(ConfigInvalid, match="use a regular file"):
        read_config(StateDir(tmp_path))


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
        (BASE + "[serving]\ninstances = -1", "instances is -1; give 0 to 256"),
        (BASE + '[serving]\noptimize_for = "speed"', "optimize_for is 'speed'"),
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
    with pytest.raises(NotBootstrapped, match="run edgert bootstrap"):
        read_config(StateDir(tmp_path))
