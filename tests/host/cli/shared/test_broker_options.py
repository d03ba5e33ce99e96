"""The options of a broker. Only the project's broker receives the project's login."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.telemetry.mqtt import MqttSettings
from edgert_deploy.cli.shared.broker_options import (
    SESSION_KEPT_S,
    broker_alone_options,
    broker_options,
    named_session,
)

PROJECT = {"broker": "broker.example", "username": "edge", "password_file": "pw", "tls": True, "ca": "ca.pem"}


@click.command()
@broker_options
def command(site: str | None, settings: MqttSettings) -> None:
    """A command with these options."""
    click.echo(json.dumps({"site": site, **asdict(settings)}))


@click.command()
@broker_alone_options
def without_site(settings: MqttSettings) -> None:
    """A command with the options of the broker, without --site."""
    click.echo(json.dumps(asdict(settings)))


def invoked(*words: str, project: dict[str, Any] | None = None) -> Result:
    return CliRunner().invoke(command, list(words), default_map=project)


def settings_of(*words: str, project: dict[str, Any] | None = None) -> dict[str, Any]:
    done = invoked(*words, project=project)
    assert done.exit_code == 0, done.output or done.exception
    return dict(json.loads(done.stdout))


def login_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a login, without the broker's address."""
    return {name: value for name, value in settings.items() if value and name not in ("site", "host", "port")}


@pytest.mark.parametrize(
    ("words", "host", "port"),
    [
        (("broker.example",), "broker.example", 1883),
        (("broker.example", "--tls"), "broker.example", 8883),
        (("broker.example:9000", "--tls"), "broker.example", 9000),
        (("mqtt://broker.example:9000",), "broker.example", 9000),
        (("::1",), "::1", 1883),
        (("[::1]:9000",), "::1", 9000),
    ],
)
def test_the_port_is_that_of_the_address_or_else_that_of_the_protocol(
    words: tuple[str, ...], host: str, port: int
) -> None:
    settings = settings_of("--broker", *words)
    assert (settings["host"], settings["port"]) == (host, port)


def test_every_option_reaches_the_settings_and_the_site_reaches_the_command() -> None:
    words = (
        "--broker",
        "b",
        "--tls",
        "--ca",
        "ca",
        "--client-cert",
        "c",
        "--client-key",
        "k",
        "--username",
        "u",
        "--password-file",
        "p",
    )
    settings = settings_of(*words, "--protocol", "5", "--site", "plänt")
    assert settings == {
        "site": "plänt", "host": "b", "port": 8883, "tls": True, "ca": "ca", "cert": "c", "key": "k",
        "username": "u", "password_file": "p", "protocol": "5",
    }  # fmt: skip
    assert settings_of("--broker", "b")["site"] is None
    assert CliRunner().invoke(without_site, ["--broker", "b", "--site", "a"]).exit_code == 2


def test_without_a_broker_the_message_names_the_key_of_the_project_file() -> None:
    done = invoked()
    assert done.exit_code == 2
    assert "below [broker] in the project's edgert.toml" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--broker", ""), "not an address"),
        (("--broker", " "), "not an address"),
        (("--broker", "b:"), "not an address"),
        (("--broker", "b:0"), "port 0"),
        (("--broker", "b:65536"), "port 65536"),
        (("--broker", "b:²"), "not an address"),
        (("--broker", "mqtts://b"), "--tls"),
        (("--broker", "ws://b"), "without ws://"),
        (("--broker", "b", "--ca", "ca.pem"), "or --tls"),
        (("--broker", "b", "--client-cert", "c.pem"), "or --tls"),
    ],
)
def test_an_address_or_a_login_that_cannot_be_used_is_refused(words: tuple[str, ...], reason: str) -> None:
    refused = invoked(*words).exception
    assert isinstance(refused, ConfigInvalid)
    assert reason in refused.message


def test_a_named_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = invoked("--broker", "b", "--username", "u", "--password-file", str(tmp_path / "pipe")).exception
    assert isinstance(refused, EdgeRTError)
    assert "use a regular file" in refused.message


# --- a project's broker


@pytest.mark.parametrize(
    "broker", ["broker.example", "broker.example:8883", "BROKER.Example.:8883", "mqtt://broker.example"]
)
def test_the_broker_of_the_project_gets_its_login_however_the_address_is_written(broker: str) -> None:
    done = invoked("--broker", broker, project=PROJECT)
    assert login_of(json.loads(done.stdout)) == login_of(settings_of(project=PROJECT))
    assert json.loads(done.stdout)["username"] == "edge"
    assert done.stderr == ""


@pytest.mark.parametrize("broker", ["other.example", "broker.example:1883", "broker.example.evil", "127.0.0.1"])
def test_another_broker_gets_no_settings_of_the_project_and_a_note_names_them(broker: str) -> None:
    done = invoked("--broker", broker, project=PROJECT)
    assert login_of(json.loads(done.stdout)) == {"protocol": "auto"}
    assert f"note: {broker} is not the project's broker (broker.example)" in done.stderr
    assert f"give --tls, --ca, --username, --password-file if {broker} needs them" in done.stderr


def test_options_of_the_command_line_apply_to_every_broker() -> None:
    given = ("--broker", "other.example", "--username", "me", "--tls")
    settings = settings_of(*given, project=PROJECT)
    assert login_of(settings) == {"username": "me", "tls": True, "protocol": "auto"}
    assert settings["port"] == 8883
    mine = settings_of("--username", "me", project=PROJECT)
    assert (mine["host"], mine["username"], mine["ca"]) == ("broker.example", "me", "ca.pem")


def test_a_project_that_has_only_an_address_causes_no_note() -> None:
    done = invoked("--broker", "other.example", project={"broker": "broker.example"})
    assert (json.loads(done.stdout)["host"], done.stderr) == ("other.example", "")


def test_a_project_without_a_broker_does_not_change_the_settings() -> None:
    assert settings_of("--broker", "b", project={}) == settings_of("--broker", "b")


def test_an_invalid_address_of_the_project_is_named() -> None:
    refused = invoked("--broker", "other.example", project={**PROJECT, "broker": "mqtts://broker.example"}).exception
    assert isinstance(refused, ConfigInvalid)
    assert "'mqtts://broker.example'" in refused.message


# --- sessions


def test_a_session_with_a_name_is_kept_for_a_day_and_a_session_without_a_name_is_not_kept() -> None:
    assert named_session("recorder", None) == ("", None)
    assert named_session("recorder", "main") == ("edgert-recorder-main", SESSION_KEPT_S)
    assert named_session("exporter", "main") != named_session("recorder", "main")


@pytest.mark.parametrize("name", ["", "a/b", "a b", "mäin", "7", "1e3", "n" * 65, "main\n"])
def test_a_name_of_a_session_that_is_not_an_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigInvalid, match="session id"):
        named_session("recorder", name)
