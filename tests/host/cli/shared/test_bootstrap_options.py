"""The options of `edgert bootstrap`: wrong options are refused before any connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import new_key
from edgert.config import read_config
from edgert.errors import ConfigInvalid
from edgert.state_dir import StateDir
from edgert_deploy.cli.shared.bootstrap_options import parse_settings, trusted_keys
from edgert_deploy.devices.inventory import Device, Inventory
from tests.support.commands import Edgert, own_key
from tests.support.servers.ports import free_port

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGKwPvYgPrP7jcXpVOKcx7C4Zg7hCAvqQX1WDVSh4xJL"
REGISTRY = "oci://registry.example.org/plant/models"


@pytest.fixture
def far(inventory: Inventory, tmp_path: Path) -> None:
    """An unreachable device `far`, and the default key. Exit code 6 would mean an attempt to connect."""
    own_key(tmp_path)
    inventory.add(Device("far", "ssh", f"pi@127.0.0.1:{free_port()}", "this-machine", "/s", "/h", HOST_KEY))


# --- runtime


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--engines", ","), "names no engine"),
        (("--engines", ""), "names no engine"),
        (("--engines", " , "), "names no engine"),
        (("--upgrade", "--previous-runtime"), "exclude each other"),
        (("--with", "speech"), "text"),
        (("--trial", "9s"), "give at least 10s and at most 1d"),
        (("--trial", "2d"), "give at least 10s and at most 1d"),
        (("--trial", "soon"), "not a duration"),
        (("--service", "launchd"), "monitor"),
        (("--mqtt-username", "edge"), "--mqtt-username needs its broker: give --broker HOST[:PORT]"),
        (("--mqtt-tls",), "--mqtt-tls needs its broker"),
        (("--mqtt-ca", "ca.pem"), "--mqtt-ca needs its broker"),
        (("--mqtt-password-file", "pw"), "--mqtt-password-file needs its broker"),
        (("--channel", "canary"), "--channel needs a registry: give --follow oci://HOST/REPOSITORY"),
        (("--registry-login", "login.json"), "--registry-login needs a registry"),
        (("--registry-ca", "ca.pem"), "--registry-ca needs a registry"),
        (("--follow", REGISTRY, "--channel", "Stable"), "not a name of a channel"),
    ],
)
def test_options_that_no_device_could_follow_are_a_usage_error(
    edgert: Edgert, far: None, words: tuple[str, ...], reason: str
) -> None:
    code, answer = edgert("bootstrap", "far", *words)
    assert (code, reason in answer["error"]["message"]) == (2, True), answer


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--broker", ""), "is not an address"),
        (("--broker", "host:0"), "from 1 to 65535"),
        (("--broker", "mqtts://host"), "--mqtt-tls"),
        (("--broker", "[::1"), "for IPv6 [ADDRESS]:PORT"),
        (("--broker", "host", "--mqtt-ca", "none.pem"), "cannot read none.pem"),
        (("--follow", ""), "not the address of a repository"),
        (("--follow", "https://registry.example.org/x"), "give oci://HOST/REPOSITORY"),
        (("--follow", "oci://registry.example.org/Models"), "names no repository"),
        (("--follow", REGISTRY, "--registry-login", "empty.json"), "has no login for registry.example.org"),
        (("--key", ""), "no key ''"),
        (("--key", "nobody"), "no key 'nobody'"),
        (("--key", "none.pem"), "none.pem"),
        (("--set", "serving.window_s=soon"), """--set 'serving.window_s="soon"'"""),
        (("--set", "serving.window_s=-1"), "window_s"),
        (("--set", "serving.speed=1"), "unknown key 'speed'"),
    ],
)
def test_invalid_values_are_an_error_before_a_device_is_asked(
    edgert: Edgert, far: None, tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    (tmp_path / "empty.json").write_text("{}")
    code, answer = edgert("bootstrap", "far", *words)
    assert (code, reason in answer["error"]["message"]) == (4, True), answer


# --- keys


def test_keys_are_given_by_name_or_file_and_kept_in_order(inventory: Inventory, tmp_path: Path) -> None:
    first, second = own_key(tmp_path), new_key()
    (tmp_path / "second.pem").write_bytes(second.public.pem())
    found = trusted_keys(("second.pem", "default", str(tmp_path / "second.pem")))
    assert [key.key_id for key in found] == [second.public.key_id, first.public.key_id, second.public.key_id]
    assert trusted_keys(()) == ()
    with pytest.raises(ConfigInvalid, match="no key 'schlüssel'"):
        trusted_keys(("schlüssel",))


# --- settings


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        ((), {}),
        (("serving.window_s=10",), {"serving": {"window_s": 10}}),
        ((" serving.window_s = 10 # seconds ", "serving.cache_mb=0"), {"serving": {"window_s": 10, "cache_mb": 0}}),
        (('http.listen="127.0.0.1:80"', 'site="plänt"'), {"http": {"listen": "127.0.0.1:80"}, "site": "plänt"}),
        (("http.listen='a=b'",), {"http": {"listen": "a=b"}}),
        (("alarms={temp_c=80}",), {"alarms": {"temp_c": 80}}),
        (("models.echo.batch_max=1", "models.echo.threads=2"), {"models": {"echo": {"batch_max": 1, "threads": 2}}}),
    ],
)
def test_a_setting_is_read_as_a_line_of_toml(lines: tuple[str, ...], settings: dict[str, Any]) -> None:
    assert parse_settings(lines) == settings


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("",), "give SECTION.KEY=VALUE"),
        (("# nothing",), "give SECTION.KEY=VALUE"),
        (("serving.window_s",), "give SECTION.KEY=VALUE"),
        (("serving.window_s 10",), "give SECTION.KEY=VALUE"),
        (("=1",), "give SECTION.KEY=VALUE"),
        (("a=1 2",), "give SECTION.KEY=VALUE"),
        (("a=" + "[" * 5000,), "give SECTION.KEY=VALUE"),
        (("a=9999-99-99",), "give SECTION.KEY=VALUE"),
        (("[mqtt]", "site='a'"), "give SECTION.KEY=VALUE"),
        (("[[models]]",), "give SECTION.KEY=VALUE"),
        (("serving.window_s=1", "serving.window_s=2"), "already exists"),
        (("serving=1", "serving.window_s=2"), "already exist"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_valid_form(lines: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        parse_settings(lines)
    assert reason in refused.value.message
    assert refused.value.message.startswith("--set")
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("http.listen=127.0.0.1:80", """--set 'http.listen="127.0.0.1:80"'"""),
        ("site=plänt", """--set 'site="plänt"'"""),
        ("site=", """--set 'site=""'"""),
        ("mqtt.username=o'brien", """--set 'mqtt.username="o'"'"'brien"'"""),
        ("mqtt.ca=C:\\ca.pem", """--set 'mqtt.ca="C:\\\\ca.pem"'"""),
        ('site=the "a"', """--set 'site="the \\"a\\""'"""),
        ("my site=a", ""),
        ("site", ""),
        ("site=" + "x" * 1000, ""),
    ],
)
def test_the_error_of_a_setting_contains_a_hint_for_the_shell_only_if_the_hint_helps(given: str, hint: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        parse_settings((given,))
    _, _, said = refused.value.message.partition("for text: ")
    assert said == hint


# --- the project's broker and registry


@pytest.mark.parametrize(
    ("own", "given", "kept"),
    [
        ('address = "broker.example"', ("--broker", "broker.example:1883"), True),
        ('address = "broker.example"', ("--broker", "Broker.Example."), True),
        ('address = "broker.example"', ("--broker", "broker.example:8883"), False),
        ('address = "broker.example"\ntls = true', ("--broker", "broker.example:8883"), True),
        ('address = "broker.example"\nca = "conf/ca.pem"', ("--broker", "broker.example:8883"), True),
        ('address = "broker.example"\nca = "conf/ca.pem"', ("--broker", "broker.example:1883"), False),
        ('address = "broker.example"', ("--broker", "broker.example", "--mqtt-ca", "conf/ca.pem"), True),
        ('address = "broker.example"', (), True),
    ],
)
def test_devices_get_the_login_of_the_project_for_its_broker_however_the_address_is_written(
    edgert: Edgert, here: Path, tmp_path: Path, own: str, given: tuple[str, ...], kept: bool
) -> None:
    (tmp_path / "conf" / "ca.pem").write_text("the authority\n")
    (tmp_path / "pw").write_text("secret\n")
    own = own.replace("conf/", "")
    (tmp_path / "conf" / "edgert.toml").write_text(
        f'[broker]\n{own}\nusername = "edge"\npassword_file = "{tmp_path}/pw"\n'
    )
    code, answer = edgert("bootstrap", "here", "--dry-run", *given)
    assert code == 0, answer
    files = [Path(name).name for name in answer["devices"][0]["files"]]
    assert ("mqtt-password" in files, "is not the project's broker" in edgert.stderr) == (kept, not kept)


@pytest.mark.parametrize(
    ("registry", "trusted"),
    [
        (REGISTRY, True),
        ("oci://registry.example.org/plant/others", True),
        ("oci://Registry.Example.org/plant/models", True),
        ("oci://registry.example.org:5000/plant/models", False),
        ("oci://elsewhere.example.org/plant/models", False),
    ],
)
def test_devices_that_follow_the_registry_of_the_project_get_its_authority(
    edgert: Edgert, here: Path, tmp_path: Path, registry: str, trusted: bool
) -> None:
    authority = tmp_path / "conf" / "ca.pem"
    authority.write_text("the authority\n")
    (tmp_path / "conf" / "edgert.toml").write_text(f'[registry]\naddress = "{REGISTRY}"\nca = "ca.pem"\n')
    assert edgert("bootstrap", "here", "--follow", registry)[0] == 0
    found = read_config(StateDir(tmp_path / "dev")).follow
    assert (found.registry, found.channel, found.credentials) == (registry, "stable", ""), (
        "the login is the publisher's"
    )
    if trusted:
        assert Path(found.ca).read_bytes() == authority.read_bytes()
    else:
        assert found.ca == ""


def test_the_option_for_the_authority_precedes_the_authority_of_the_project(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    for name in ("conf/ca.pem", "given.pem"):
        (tmp_path / name).write_text(name)
    (tmp_path / "conf" / "edgert.toml").write_text(f'[registry]\naddress = "{REGISTRY}"\nca = "ca.pem"\n')
    assert edgert("bootstrap", "here", "--follow", REGISTRY, "--registry-ca", "given.pem")[0] == 0
    assert Path(read_config(StateDir(tmp_path / "dev")).follow.ca).read_text() == "given.pem"
