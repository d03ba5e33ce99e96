"""`edgert bootstrap` writes its options to the device and removes the login for another broker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgert.config import read_config
from edgert.state_dir import StateDir
from edgert_deploy.devices.inventory import Inventory
from hil.support.sshd import SshDevice
from tests.support.commands import Edgert


@pytest.mark.parametrize("selector", ["board", "second", "all"])
def test_two_names_of_one_machine_are_refused(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice, selector: str
) -> None:
    for name in ("board", "second"):
        inventory.add(replace(sshd.device(name), state=f"/tmp/{name}"))
    code, value = edgert("bootstrap", selector, "--dry-run")
    assert (code, "--same-machine" in value["error"]["message"]) == (4, True)
    code, value = edgert("bootstrap", selector, "--dry-run", "--same-machine")
    assert "no key 'default'" in value["error"]["message"], "it went on"


def test_a_device_is_set_up_to_follow_a_channel_with_its_tags(edgert: Edgert, here: Path, tmp_path: Path) -> None:
    login = tmp_path / "login.json"
    login.write_text('{"auths": {"registry.example.org": {"auth": "dTpwYXNz"}}}')
    assert edgert("device", "set", "here", "--tag", "rack=3")[0] == 0
    words = ("--follow", "oci://registry.example.org/plant/models", "--channel", "canary", "--registry-login", login)
    code, answer = edgert("bootstrap", "here", *words)
    assert code == 0
    assert {"configuration", "registry-login"} <= set(answer["devices"][0]["changed"])
    state = tmp_path / "dev"
    found = read_config(StateDir(state)).follow
    assert (found.registry, found.channel, found.tags) == (words[1], "canary", ("rack=3",))
    assert Path(found.credentials).read_bytes() == login.read_bytes()
    assert Path(found.credentials).stat().st_mode & 0o777 == 0o600
    assert edgert("bootstrap", "here")[1]["devices"][0]["changed"] == [], "and stays so"


def test_another_registry_gets_neither_the_login_nor_the_authority_of_the_previous_registry(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    login, authority = tmp_path / "login.json", tmp_path / "ca.pem"
    login.write_text('{"auths": {"registry.example.org": {"auth": "dTpwYXNz"}}}')
    authority.write_text("the authority\n")
    first = ("--follow", "oci://registry.example.org/plant/models")
    assert edgert("bootstrap", "here", *first, "--registry-login", login, "--registry-ca", authority)[0] == 0
    assert edgert("bootstrap", "here", "--follow", "oci://registry.example.org/other")[0] == 0
    found = read_config(StateDir(tmp_path / "dev")).follow
    assert (Path(found.credentials).name, Path(found.ca).name) == ("registry-login", "registry-ca.pem"), "one registry"
    assert edgert("bootstrap", "here", "--follow", "oci://elsewhere.example.org/models")[0] == 0
    found = read_config(StateDir(tmp_path / "dev")).follow
    assert (found.credentials, found.ca) == ("", "")
    assert not list((tmp_path / "dev").glob("registry-*")), "the files that nothing names are gone"


def test_another_broker_gets_neither_the_login_nor_the_authority_of_the_previous_broker(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    password, authority = tmp_path / "password", tmp_path / "ca.pem"
    password.write_text("secret\n")
    authority.write_text("the authority\n")
    login = ("--mqtt-username", "edge", "--mqtt-password-file", password, "--mqtt-ca", authority)
    assert edgert("bootstrap", "here", "--broker", "127.0.0.1:1", *login)[0] == 0
    found = read_config(StateDir(tmp_path / "dev")).mqtt
    assert (found.username, Path(found.ca).name, found.tls) == ("edge", "mqtt-ca.pem", True)
    assert edgert("bootstrap", "here", "--broker", "127.0.0.1:2", "--mqtt-tls")[0] == 0
    found = read_config(StateDir(tmp_path / "dev")).mqtt
    assert (found.port, found.username, found.password_file, found.ca, found.tls) == (2, "", "", "", True)
    assert not list((tmp_path / "dev").glob("mqtt-*")), "the files that nothing names are gone"


@pytest.mark.parametrize(
    ("setting", "option"),
    [('follow.registry="oci://elsewhere.example.org/models"', "--follow"), ('mqtt.host="elsewhere"', "--broker")],
)
def test_an_address_with_a_login_is_changed_only_by_its_option(
    edgert: Edgert, here: Path, setting: str, option: str
) -> None:
    code, answer = edgert("bootstrap", "here", "--set", setting)
    assert (code, f"give {option}" in answer["error"]["message"]) == (4, True)


def test_a_device_keeps_its_own_login_at_the_projects_broker_unless_options_give_another(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    team, own = tmp_path / "team", tmp_path / "own"
    team.write_text("team\n")
    own.write_text("own\n")
    (tmp_path / "conf" / "edgert.toml").write_text(
        f'[broker]\naddress = "127.0.0.1:1"\nusername = "edge"\npassword_file = "{team}"\n'
    )

    def login() -> tuple[str, str]:
        found = read_config(StateDir(tmp_path / "dev")).mqtt
        return found.username, Path(found.password_file).read_text()

    assert edgert("bootstrap", "here")[0] == 0
    assert login() == ("edge", "team\n"), "a device without a login gets the project's"
    given = ("--mqtt-username", "pi-07", "--mqtt-password-file", own)
    assert edgert("bootstrap", "here", *given)[0] == 0
    assert login() == ("pi-07", "own\n")
    assert edgert("bootstrap", "here")[1]["devices"][0]["changed"] == []
    assert "keeps its own login pi-07 at the broker; --mqtt-username edge with" in edgert.stderr
    assert login() == ("pi-07", "own\n")
    assert edgert("bootstrap", "here", "--mqtt-username", "edge")[0] == 0
    assert login() == ("edge", "team\n")
    team.write_text("newer\n")
    assert edgert("bootstrap", "here")[0] == 0
    assert login() == ("edge", "newer\n"), "the project's own login follows the project"
