"""The doctor finds what is wrong on a real host, names the next step, and changes nothing."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.bundle.signing import new_key, write_key_pair
from edgert_deploy.common.keys import key_paths
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.doctor import FAIL, OK, WARN
from edgert_deploy.doctor.host import check_host, signing_keys
from hil.support.keys import new_ssh_key
from tests.support.devices import WAIT_S_MAX
from tests.support.findings import levels, text_of
from tests.support.servers.brokers import Broker
from tests.support.servers.registries import RegistryServer


def test_a_complete_host_passes_all_checks(inventory: Inventory, tmp_path: Path) -> None:
    inventory.add(Device("here", "local", "/srv/x", "this-machine", "/srv/x"))
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    new_ssh_key(tmp_path / "home" / ".ssh" / "id_ed25519")
    found = check_host(inventory)
    assert [f for f in found if f.level != OK and f.check != "disk"] == []  # the free space depends on this machine
    assert list(signing_keys().values()) == ["default"]


def test_a_host_of_a_team_needs_no_signing_key_to_deploy(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_paths(tmp_path / "conf" / "keys", "default")
    private.unlink()
    assert levels(check_host(inventory), "signing key") == [FAIL]
    (tmp_path / "fleet" / "keys").mkdir(parents=True)
    (tmp_path / "fleet" / "edgert.toml").touch()
    public.rename(tmp_path / "fleet" / "keys" / "default.pem")
    monkeypatch.chdir(tmp_path / "fleet")
    assert levels(check_host(inventory), "signing key") == [WARN]


def test_a_fault_of_the_host_is_reported_with_its_next_step(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_paths(tmp_path / "conf" / "keys", "default")
    private.chmod(0o644)
    assert f"chmod 600 {private}" in text_of(check_host(inventory), "signing key")
    private.chmod(0o600)
    public.unlink()  # the user restored only the private half
    assert levels(check_host(inventory), "signing key") == [OK]
    write_key_pair(new_key(), *key_paths(tmp_path / "conf" / "keys", "other"))
    public.write_bytes(key_paths(tmp_path / "conf" / "keys", "other")[1].read_bytes())
    assert "do not match" in text_of(check_host(inventory), "signing key")
    private.write_text("no key")
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "config").write_text("Include config\n")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "nobody"))
    inventory.path.write_text("[devices.X]\n")
    found = check_host(inventory)
    assert levels(found, "signing key") == [FAIL, OK]
    assert levels(found, "inventory") == [FAIL]
    assert "includes more than" in text_of(found, "ssh")
    assert "ssh-add" in text_of(found, "ssh")
    inventory.path.write_text("")
    inventory.add(replace(Device("a", "local", "/srv/x", "p", "/srv/x"), identity=str(tmp_path / "none")))
    assert "edgert device set a --identity" in text_of(check_host(inventory), "inventory")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere but on a read-only disk
    assert "make it writable, or set XDG_CACHE_HOME to another folder" in text_of(check_host(inventory), "disk")


def test_the_doctor_logs_in_to_the_broker_of_the_project(inventory: Inventory, tmp_path: Path) -> None:
    with Broker.in_folder(tmp_path / "broker") as broker:
        (tmp_path / "conf" / "edgert.toml").write_text(f'[broker]\naddress = "127.0.0.1:{broker.port}"\n')
        assert levels(check_host(inventory), "broker") == [OK]
    found = check_host(inventory)
    assert levels(found, "broker") == [FAIL]
    assert [f.exit_code for f in found if f.check == "broker"] == [6]


def test_a_project_without_a_login_for_its_devices_gets_a_warning(inventory: Inventory, tmp_path: Path) -> None:
    with Broker.in_folder(tmp_path / "broker", secured=True) as broker:
        address = f'[broker]\naddress = "localhost:{broker.port}"\nca = "{broker.settings.ca}"\ntls = true\n'
        (tmp_path / "conf" / "edgert.toml").write_text(address)
        assert levels(check_host(inventory), "broker") == [WARN]
        (tmp_path / "wrong").write_text("wrong\n")
        login = f'username = "{broker.settings.username}"\npassword_file = "{tmp_path / "wrong"}"\n'
        (tmp_path / "conf" / "edgert.toml").write_text(address + login)
        assert levels(check_host(inventory), "broker") == [FAIL]


def test_the_doctor_logs_in_to_the_registry_of_the_project(inventory: Inventory, tmp_path: Path) -> None:
    assert levels(check_host(inventory), "registry") == []
    with RegistryServer.in_folder(tmp_path / "registry", secured=True) as server:
        lines = [f'address = "{server.address}"', f'ca = "{server.ca}"', f'login = "{server.login_file}"']
        (tmp_path / "conf" / "edgert.toml").write_text("\n".join(["[registry]", *lines]))
        assert levels(check_host(inventory), "registry") == [OK]
        server.write_login("wrong")
        assert "refuses user 'publisher'" in text_of(check_host(inventory), "registry")
    found = check_host(inventory)
    assert [(f.level, f.exit_code) for f in found if f.check == "registry"] == [(FAIL, 6)]


@pytest.mark.parametrize("table", ["broker", "registry"])
def test_the_next_step_for_an_invalid_address_names_the_table_of_the_project_file(
    table: str, inventory: Inventory, tmp_path: Path
) -> None:
    (tmp_path / "conf" / "edgert.toml").write_text(f'[{table}]\naddress = "ftp://x/y"\n')
    found = [finding for finding in check_host(inventory) if finding.check == table]
    assert [(f.level, f.exit_code, f"[{table}]" in f.next_step) for f in found] == [(FAIL, 4, True)]


def test_an_ssh_agent_that_hangs_up_gives_a_warning(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))

        def hang_up() -> None:
            for _ in range(2):
                agent.accept()[0].close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        found = check_host(inventory)
        thread.join(WAIT_S_MAX)
    assert "no agent answers" in text_of(found, "ssh")
    assert FAIL not in levels(found, "ssh")
