"""A device's configuration keeps the user's text. Options give the broker's address and login."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomlkit

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.device_files import Broker, Following, config_text, merged_config, wanted_files
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.devices.transports.local import LocalTransport
from tests.support.machines import PI_4


def test_text_of_the_user_in_the_configuration_of_the_device_stays() -> None:
    present = '# ours\ndevice = "old"\n\n[serving]\nthreads = 2  # measured\n\n[mqtt]\nhost = "a"\ncert = "c"\n'
    merged = merged_config(tomlkit.parse(present), {"device": "new", "site": "s", "mqtt": {"host": "b", "port": 1883}})
    assert "threads = 2  # measured" in merged
    value = tomlkit.parse(merged).unwrap()
    assert value == {
        "device": "new",
        "site": "s",
        "serving": {"threads": 2},
        "mqtt": {"host": "b", "cert": "c", "port": 1883},
    }
    assert merged_config(tomlkit.parse(merged), {"device": "new", "site": "s"}) == merged


def test_a_configuration_whose_table_is_not_a_table_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="mqtt = 3"):
        merged_config(tomlkit.parse("mqtt = 3\n"), {"mqtt": {"host": "b"}})


def test_each_bootstrap_of_a_device_that_follows_a_channel_writes_its_tags(tmp_path: Path) -> None:
    here = Device("here", "local", str(tmp_path), "this-machine", str(tmp_path), tags=("rack=4",))
    profile = load_profile("this-machine")
    for follow, tags in (('registry = "oci://h/models"\ntags = ["rack=3"]', ("rack=4",)), ("", ())):
        (tmp_path / "config.toml").write_text(f'device = "here"\nprofile = "this-machine"\n[follow]\n{follow}\n')
        _, config = wanted_files(here, profile, PI_4, (), None, None, {}, False, LocalTransport(here))
        assert config.follow.tags == tags


def test_a_configuration_of_an_editor_on_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('device = "d"\nprofile = "this-machine"\n', "utf-8-sig")
    here = Device("here", "local", str(tmp_path), "this-machine", str(tmp_path))
    text = config_text(here.state, LocalTransport(here))
    assert merged_config(tomlkit.parse(text), {"device": "d"}) == text


@pytest.mark.parametrize(
    ("text", "ca", "host", "port"),
    [
        ("10.0.0.1", None, "10.0.0.1", 1883),
        ("broker:1884", None, "broker", 1884),
        ("broker", "ca.pem", "broker", 8883),
        ("[fe80::1]:8883", None, "fe80::1", 8883),
        ("[fe80::1]", None, "fe80::1", 1883),
        ("fe80::1", None, "fe80::1", 1883),
    ],
)
def test_the_address_of_a_broker_is_read(text: str, ca: str | None, host: str, port: int, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("a certificate")
    broker = Broker.parse(text, "", None, tmp_path / ca if ca else None)
    assert (broker.host, broker.port) == (host, port)


def test_the_error_names_a_missing_password_file_and_a_password_is_never_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="none"):
        Broker.parse("broker", "edge", tmp_path / "none", None)
    (tmp_path / "pw").write_text("xyzzy7\n")
    assert "xyzzy7" not in repr(Broker.parse("broker", "edge", tmp_path / "pw", None))


def test_a_login_for_another_registry_is_refused(tmp_path: Path) -> None:
    login = tmp_path / "login.json"
    login.write_text('{"auths": {"other.example.org": {"auth": "dTpwYXNz"}}}')
    with pytest.raises(ConfigInvalid, match="no login for registry"):
        Following.parse("oci://registry.example.org/models", "stable", None, login)
    login.write_text('{"auths": {"registry.example.org": {"auth": "dTpwYXNz"}}}')
    following = Following.parse("oci://registry.example.org/models", "stable", None, login)
    assert "dTpwYXNz" not in repr(following)
