"""A project's file gives the defaults of options, in every folder of the project."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.cli import edgert, main
from edgert_deploy.cli.init import PROJECT
from edgert_deploy.cli.shared.types import NewBundlePath
from edgert_deploy.common.keys import keys_dir
from edgert_deploy.common.project import (
    BrokerDefaults,
    Project,
    RegistryDefaults,
    find_bundle,
    find_project,
    read_project,
)
from edgert_deploy.devices.inventory import find_inventory
from tests.support.devices import wait_until
from tests.support.servers.brokers import Broker

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


def test_every_default_that_init_shows_in_a_comment_is_valid(folder: Path) -> None:
    shown = [line.removeprefix("# ") for line in PROJECT.splitlines() if " = " in line or line.startswith("# [")]
    (folder / "edgert.toml").write_text("\n".join(line for line in shown if line[0] == "[" or line.split()[1] == "="))
    project = read_project(folder / "edgert.toml")
    assert (project.inventory, project.bundles) == (folder / "inventory.toml", folder / "bundles")
    assert project.broker == BrokerDefaults(
        address="10.0.0.1:8883",
        tls=True,
        ca=str(folder / "ca.pem"),
        username="edge",
        password_file=str(Path("~/.config/edgert/mqtt-password").expanduser()),
    )
    assert project.trial == {"watch": "10m", "error_share": "0.1%", "digits": {"p99_ms": 8}}
    assert project.p99_target_ms == {"digits": 20.0}


def test_a_project_is_found_from_subfolders_and_the_nearest_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = folder.parent / "conf"
    assert find_project().root == conf
    assert (find_inventory().path, keys_dir()) == (conf / "inventory.toml", conf / "keys")
    (folder / "edgert.toml").write_text('inventory = "fleet.toml"\nkeys = "../keys"\nbundles = "b"\n')
    (folder / "a" / "deep").mkdir(parents=True)
    monkeypatch.chdir(folder / "a" / "deep")
    assert (find_inventory().path, keys_dir()) == (folder / "fleet.toml", folder / "../keys")
    (folder / "b").mkdir()
    (folder / "b" / "m.edgert").touch()
    assert find_bundle(Path("m.edgert")) == folder / "b" / "m.edgert"
    with pytest.raises(ConfigInvalid, match=r"no bundle sub/m\.edgert"):
        find_bundle(Path("./sub/m.edgert"))
    with pytest.raises(ConfigInvalid, match="is a folder"):
        find_bundle(Path("."))
    assert NewBundlePath().convert("new.edgert", None, None) == folder / "b" / "new.edgert"
    Path("m.edgert").touch()
    assert find_bundle(Path("m.edgert")) == Path("m.edgert")
    (folder / "a" / "edgert.toml").touch()
    assert find_project().root == folder / "a"


def test_commands_take_their_defaults_from_the_project_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "edgert.toml").write_text('selector = "second"\n[broker]\naddress = "127.0.0.1:1"\n')
    for name in ("first", "second"):
        assert main(["device", "add", name, "--local", name, "--json"]) == 0
    capfd.readouterr()
    main(["status", "--json"])
    assert [d["device"] for d in json.loads(capfd.readouterr().out)["devices"]] == ["second"]
    main(["status", "first", "--json"])
    assert [d["device"] for d in json.loads(capfd.readouterr().out)["devices"]] == ["first"]
    assert main(["fleet", "watch", "--once", "--json"]) != 2, "--broker need not be given"
    capfd.readouterr()
    assert main(["rollback", "m"]) == 2, "rolling back asks for a selector"
    assert "write them once" not in capfd.readouterr().err, "the project's does not help"
    (folder / "edgert.toml").write_text("")
    assert main(["bootstrap"]) == 2
    assert "or write them once as `selector`" in capfd.readouterr().err
    (folder / "edgert.toml").write_text('[broker]\naddress = "10.0.0.1"\ntls = true\n')
    assert find_project().option_defaults()["bootstrap"] == {"broker": "10.0.0.1", "mqtt_tls": True}, (
        "never in the clear"
    )


def test_a_login_is_sent_only_to_the_broker_of_the_project(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The broker of --broker receives neither name nor password. This real broker accepts every login."""
    (folder.parent / "pw").write_text("secret\n")
    with Broker.in_folder(tmp_path / "broker", extra=("log_type all",)) as broker:
        own = f'[broker]\naddress = "127.0.0.1:{broker.port}"\nusername = "edge"\npassword_file = "../pw"\n'

        def names_seen(project: str, *words: str) -> list[str]:
            (folder / "edgert.toml").write_text(project)
            log = broker.folder / "mosquitto.log"
            before = log.stat().st_size
            assert main(["fleet", "watch", "--once", *words]) == 0
            wait_until(lambda: b"New client connected" in log.read_bytes()[before:], "the broker logs the login")
            return re.findall(r"New client connected .*u'(\w+)'", log.read_bytes()[before:].decode())

        assert names_seen(own, "--broker", f"127.0.0.1:{broker.port}") == ["edge"], "the same one"
        assert "note: " not in capfd.readouterr().err
        other = own.replace(str(broker.port), "1").replace("[broker]", "[broker]\ntls = true\nca = 'none.pem'")
        assert names_seen(other, "--broker", f"127.0.0.1:{broker.port}") == []
        said = capfd.readouterr().err
        assert "is not the project's broker (127.0.0.1:1), " in said
        assert "--tls, --ca, --username, --password-file" in said


def test_devices_do_not_receive_the_login_of_another_broker(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "pw").write_text("secret\n")
    own = '[broker]\naddress = "127.0.0.1:1"\nusername = "edge"\npassword_file = "../pw"\n'
    (folder / "edgert.toml").write_text(own)
    assert main(["init"]) == 0
    assert main(["device", "add", "here", "--local", "dev"]) == 0

    def planned(*words: str) -> bool:
        capfd.readouterr()
        assert main(["bootstrap", "here", "--dry-run", "--json", *words]) == 0
        return any(f.endswith("mqtt-password") for f in json.loads(capfd.readouterr().out)["devices"][0]["files"])

    assert planned()
    assert not planned("--broker", "127.0.0.1:2")
    assert planned("--broker", "127.0.0.1:2", "--mqtt-username", "me", "--mqtt-password-file", "../pw")
    assert main(["bootstrap", "here", "--set", 'mqtt.host="other"']) == 4, "--broker would drop the login"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("colour = 'red'", "unknown key 'colour'"),
        ("selector = 3", "must be text"),
        ("selector = ''", "must be text"),
        ("keys = 'keys'", "outside"),
        ("[broker]\nkey = 'client.pem'", "outside"),
        ("[broker]\npassword_file = 'pw'", "outside"),
        ("store = 'postgresql://ops:secret@db/fleet'", "password"),
        ("store = 'postgresql://db/fleet?user=ops&password=x'", "password"),
        ("store = 'mysql://db/fleet'", "is not a store"),
        ("broker = 'x'", "must be a table"),
        ("p99_target_ms = 20", "must be a table"),
        ("[p99_target_ms]\ndigits = 0", "give ms"),
        ("[broker]\nhost = 'x'", "unknown key 'host'"),
        ("[broker]\ntls = 'yes'", "tls is 'yes', not of type bool"),
        ("selector = ", "not TOML"),
        ("#" * 70_000, "the limit is"),
    ],
)
def test_the_error_about_an_invalid_project_file_names_the_fault(folder: Path, text: str, what: str) -> None:
    (folder / "edgert.toml").write_text(text)
    with pytest.raises(ConfigInvalid, match=what):
        find_project()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "is a named pipe"),
        (Path.mkdir, "Is a directory"),
        (lambda file: file.symlink_to("moved.toml"), "No such file"),
    ],
)
def test_a_project_file_that_is_no_file_is_refused(folder: Path, make: Callable[[Path], None], what: str) -> None:
    make(folder / "edgert.toml")
    with pytest.raises(ConfigInvalid, match=rf"edgert\.toml.*{what}"):
        find_project()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_project_file_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    (folder / "edgert.toml").touch()
    os.chown(folder / "edgert.toml", 12345, 12345)
    with pytest.raises(ConfigInvalid, match="belongs to user 12345"):
        find_project()
    monkeypatch.setenv("SUDO_UID", "12345")
    assert find_project().root == folder


def test_every_option_that_could_have_a_default_has_a_default(tmp_path: Path) -> None:
    broker = BrokerDefaults("h", tls=True, ca="a", cert="b", key="c", username="d", password_file="e", protocol="v5")
    project = Project(
        tmp_path, tmp_path / "i", tmp_path, "s", "all", None, tmp_path, broker, RegistryDefaults("r", "c", "l")
    )
    defaults = project.option_defaults()
    for words, command in _commands(edgert, ()):
        table: Any = defaults
        for word in words:
            table = table.get(word, {})
        names = {parameter.name for parameter in command.params}
        for name in names & {
            "broker",
            "tls",
            "ca",
            "cert",
            "password_file",
            "mqtt_ca",
            "profiles_dir",
            "store_url",
            "login",
        }:
            assert name in table, (words, name)
        assert not {k for k, v in table.items() if not isinstance(v, dict)} - names - {"protocol"}, words


@pytest.mark.parametrize("words", [["fleet", "watch"], ["bootstrap"], ["deploy", "x.edgert"]])
def test_an_error_about_a_missing_option_names_the_project_file(
    words: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (Path.cwd() / "x.edgert").touch()
    assert main(words) == 2
    assert "edgert.toml" in capfd.readouterr().err


def _commands(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*words, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*words, name))


def test_the_help_imports_no_library_except_click(folder: Path) -> None:
    """The search for a project imports no slow modules."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from edgert_deploy.cli import main; main(['--help'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "edgert_deploy.common.project" in done.stderr
    assert not {"fabric", "numpy", "tomlkit"} & {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
