"""The service units in a container with systemd, as root and as another user.

tests/host/devices/test_service.py tests what needs no start of a unit.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hil import rootfs
from hil.containers import Container, running_container
from hil.dut import Dut, reached
from hil.host import Host
from hil.sshd import free_port
from tests.support.brokers import PASSWORD, USER, Broker, mosquitto
from tests.support.bundles import make_null_bundle
from tests.support.devices import wait_until

PROFILE = "generic-x86-64"
NAME = "board"

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class World:
    """One host and one container; `sh` runs a script there as root."""

    host: Host
    container: Container
    broker: Broker

    def sh(self, script: str) -> str:
        return self.host.on(NAME, "sh", "-c", script).stdout.strip()

    def unit(self, name: str) -> str:
        return self.sh(f"systemctl show edgertd --value -p {name}")

    def inside(self, script: str) -> int:
        """Return the exit code of a script that runs as the daemon's user and sees the daemon's files."""
        words = f'nsenter -t {self.unit("MainPID")} -m -- runuser -u edgert -- sh -c "$1"; echo $?'
        return int(self.host.on(NAME, "sh", "-c", words, "sh", script).stdout.split()[-1])

    def deploy(self, release: int, code: int = 0, **options: object) -> None:
        bundle = make_null_bundle(self.host.folder, self.host.key, release=release, profile=PROFILE, **options)  # type: ignore[arg-type]
        self.host.edgert("deploy", bundle, NAME, code=code)

    def wait_until_it_serves(self, pid_before: str) -> None:
        wait_until(
            lambda: self.unit("ActiveState") == "active" and self.unit("MainPID") not in ("0", pid_before),
            "systemd started the daemon again",
            90,
        )
        wait_until(lambda: self.host.model(NAME, "echo")["serving"]["state"] == "ready", "it serves", 60)


@pytest.fixture(scope="module")
def world(containers_run: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("broker")
    with running_container(tmp_path_factory.mktemp("device")) as container:
        host = Host(tmp_path_factory.mktemp("host"))
        host.edgert("keys", "new")
        host.add(reached(Dut(NAME, PROFILE), container))
        (folder / "password").write_text(PASSWORD + "\n")
        made = [mosquitto("mosquitto_passwd"), "-b", "-c", str(folder / "users"), USER, PASSWORD]
        subprocess.run(made, check=True, capture_output=True)
        port = free_port()
        extra = (f"listener {port} {container.host_ip}", f"password_file {folder}/users", "log_type all")
        with Broker.in_folder(folder, extra=extra) as broker:
            host.edgert(
                "bootstrap", NAME, "--engine", "null", "--broker", f"{container.host_ip}:{port}",
                "--mqtt-username", USER, "--mqtt-password-file", folder / "password",
            )  # fmt: skip
            made_world = World(host, container, broker)
            made_world.deploy(1)
            yield made_world


def test_the_daemon_is_a_user_without_rights_who_can_write_its_state_only(world: World) -> None:
    pid = world.unit("MainPID")
    status = dict(line.split(":\t", 1) for line in world.sh(f"cat /proc/{pid}/status").splitlines() if ":\t" in line)
    assert world.sh(f"stat -c %U /proc/{pid}") == "edgert"
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert world.inside("touch /var/lib/edgert/models/x && rm /var/lib/edgert/models/x") == 0
    for place in ("/etc/x", "/opt/edgert/x", "/var/lib/edgert/keys/x", "/usr/x"):
        assert world.inside(f"touch {place} 2>/dev/null") != 0, place
    assert world.inside("cat /root/.ssh/authorized_keys >/dev/null 2>&1") != 0


def test_only_the_daemon_can_read_the_broker_password(world: World) -> None:
    log = world.broker.folder / "mosquitto.log"
    wait_until(lambda: f"u'{USER}'" in log.read_text(), "the device reports under its user", 60)
    assert "not authorised" not in log.read_text()
    assert world.sh("stat -c '%U %a' /var/lib/edgert/mqtt-password") == "root 600"
    assert world.inside("cat /var/lib/edgert/mqtt-password >/dev/null 2>&1") != 0


def test_root_removes_a_key_that_the_daemon_cannot_change(world: World) -> None:
    key = world.host.key.public.key_id
    assert world.host.edgert("keys", "remove", key, NAME, "--force")["devices"][0]["keys"] == []
    (again,) = world.host.edgert("bootstrap", NAME, "--engine", "null")["devices"]
    assert again["changed"] == [f"key {key}"]
    for name in ("keys", "config.toml", f"keys/{world.sh('ls /var/lib/edgert/keys')}"):
        assert world.sh(f"stat -c %U /var/lib/edgert/{name}") == "root", name


def test_only_apps_of_the_group_may_connect(world: World) -> None:
    ask = '/opt/edgert/venv/bin/python -c \'from edgert import Client; print(Client("/run/edgert/edgert.sock").metadata("echo"))\''
    assert int(world.sh(f"runuser -u {rootfs.USER} -- {ask} >/dev/null 2>&1; echo $?")) != 0
    world.sh(f"usermod --append --groups edgert {rootfs.USER}")
    assert int(world.sh(f"runuser -u {rootfs.USER} -- {ask} >/dev/null; echo $?")) == 0


def test_a_killed_daemon_restarts_and_serves(world: World) -> None:
    pid = world.unit("MainPID")
    world.sh(f"kill -9 {pid}")
    world.wait_until_it_serves(pid)
    lines = world.host.edgert("logs", NAME, "--since", "1h")["lines"]
    assert any("status=9/KILL" in line for line in lines), "the journal, as systemd keeps the daemon"
    # It was bootstrapped with the null engine only, which the doctor reports.
    seen = [one for one in world.host.edgert("doctor", NAME, code=7)["findings"] if one["where"] == NAME]
    assert [one["check"] for one in seen if one["level"] != "ok"] == ["engine"], seen
    assert {one["check"] for one in seen} >= {"reachable", "clock", "service", "socket", "keys", "telemetry", "model"}


def test_a_daemon_that_cannot_start_is_restarted_until_it_can(world: World) -> None:
    """No operator restarts it: systemd's own limit of starts is off."""
    config, folder = "/var/lib/edgert/config.toml", "/run/systemd/system/edgertd.service.d"
    world.sh(
        f"mkdir -p {folder}; printf '[Service]\\nRestartSec=100ms\\n' >{folder}/quick.conf; systemctl daemon-reload"
    )
    pid, tried = world.unit("MainPID"), int(world.unit("NRestarts"))
    world.sh(f"cp -p {config} /root/kept; echo nonsense >{config}; kill -9 {pid}")
    try:
        wait_until(lambda: int(world.unit("NRestarts")) > tried + 11, "systemd tries again and again", 200)
    finally:
        world.sh(f"cp -p /root/kept {config}; rm -r {folder}; systemctl daemon-reload")
    world.wait_until_it_serves(pid)


def test_the_watchdog_restarts_a_daemon_that_hangs(world: World) -> None:
    folder = "/run/systemd/system/edgertd.service.d"
    world.sh(f"mkdir -p {folder}; printf '[Service]\\nWatchdogSec=2\\n' >{folder}/quick.conf; systemctl daemon-reload")
    world.sh("systemctl restart edgertd")
    try:
        pid = world.unit("MainPID")
        world.sh(f"kill -STOP {pid}")
        world.wait_until_it_serves(pid)
        assert "watchdog" in world.sh("journalctl -u edgertd --no-pager | tail -n 40").lower()
    finally:
        world.sh(f"rm -r {folder}; systemctl daemon-reload; systemctl restart edgertd")


def test_a_trial_continues_after_a_restart_of_the_daemon(world: World) -> None:
    """A restart of the daemon is no reboot: commands and the unit see the same boot id."""
    bundle = make_null_bundle(world.host.folder, world.host.key, release=2, profile=PROFILE, op="sum")
    there = "/var/lib/edgert/incoming/two.edgert"
    world.container.root.joinpath(there[1:]).write_bytes(bundle.read_bytes())
    world.host.edgertd(NAME, "install", there)
    world.host.edgertd(NAME, "activate", "echo", "--trial-s", "600")
    pid = world.unit("MainPID")
    world.sh(f"kill -9 {pid}")
    world.wait_until_it_serves(pid)
    assert world.host.model(NAME, "echo")["state"] == "trial"
    world.host.edgertd(NAME, "rollback", "echo")
    assert world.host.model(NAME, "echo")["live"]["release"] == 1


def test_a_user_without_rights_gets_a_service_that_survives_a_reboot(world: World, tmp_path: Path) -> None:
    container = world.container
    host = Host(tmp_path)
    host.edgert("keys", "new")
    host.add(reached(Dut("mine", PROFILE), container, rootfs.USER))
    files_before = world.sh(f"ls -A /home/{rootfs.USER}").split()
    refused = host.edgert(
        "bootstrap", "mine", "--engine", "null", code=7
    )  # without polkit only root may enable lingering
    assert f"loginctl enable-linger {rootfs.USER}" in refused["error"]["message"]
    assert world.sh(f"ls -A /home/{rootfs.USER}").split() == files_before, "it was refused before anything was sent"
    world.sh(f"loginctl enable-linger {rootfs.USER}")
    (done,) = host.edgert("bootstrap", "mine", "--engine", "null")["devices"]
    assert done["service"] == "systemd"
    host.edgert("deploy", make_null_bundle(tmp_path, host.key, profile=PROFILE), "mine")
    container.cycle()

    def serves() -> bool:
        (row,) = host.edgert("status", "mine")["devices"]
        models = row["status"]["models"]
        return bool(models and (models[0].get("serving") or {}).get("state") == "ready")

    wait_until(serves, "the user's own daemon serves after a power cut", 60)
    assert host.edgert("logs", "mine")["lines"], "its user may read its journal"
    wait_until(lambda: world.unit("ActiveState") == "active", "and so does the system's", 60)
    assert world.host.model(NAME, "echo")["live"]["release"] == 1
    host.edgert("uninstall", "mine", "--purge", "--yes")
    assert world.sh(f"ls -A /home/{rootfs.USER}").split() == files_before
    assert world.sh("ls /var/lib/systemd/linger") == rootfs.USER  # root enabled lingering, so it stays
