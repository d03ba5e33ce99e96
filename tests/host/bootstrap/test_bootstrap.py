"""Bootstrap on this machine is idempotent, restarts only if needed, and names missing things."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from edgert.bundle.signing import new_key
from edgert.errors import ConfigInvalid, DeployUnderWay, DeviceError, EngineMissing
from edgert.telemetry.broker_connection import CONNECTED
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.bootstrap.bootstrap import BootstrapResult, bootstrap
from edgert_deploy.bootstrap.plan import BootstrapOptions
from edgert_deploy.devices.device_files import Broker, check_settings
from edgert_deploy.devices.facts import _PROBE
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.devices.remote_daemon import RemoteDaemon
from edgert_deploy.devices.service import serves, unit_for
from edgert_deploy.devices.transports import open_transport
from hil.support.sshd import running_sshd
from tests.support.devices import Device as Board
from tests.support.devices import wait_until
from tests.support.machines import PI_4
from tests.support.paths import ROOT
from tests.support.servers.brokers import Broker as RunningBroker

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")

PROFILE = load_profile("this-machine", ROOT / "devices")
OTHER_ENGINE_PROFILE = load_profile("jetson-orin-nano", ROOT / "devices")


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    local = Device("here", "local", str(tmp_path / "dev"), PROFILE.name, str(tmp_path / "dev"), site="lab")
    yield local
    if (tmp_path / "dev" / "config.toml").exists():
        RemoteDaemon(open_transport(local), local).call("stop")


def do(device: Device, *keys: object, **options: object) -> BootstrapResult:
    return bootstrap(device, PROFILE, BootstrapOptions(keys, engines="null", **options), open_transport(device))  # type: ignore[arg-type]


def test_a_second_bootstrap_changes_nothing_and_another_key_needs_no_restart(device: Device, tmp_path: Path) -> None:
    first, second = new_key().public, new_key().public
    done = do(device, first)
    assert done.changed == [f"key {first.key_id}", "configuration"]
    pid = done.status.daemon.pid
    assert do(device, first).changed == []
    again = do(device, second)
    assert again.changed == [f"key {second.key_id}"]
    assert sorted(again.status.keys) == sorted([first.key_id, second.key_id])
    assert again.status.daemon.pid == pid
    assert (again.status.site, again.status.profile) == ("lab", "this-machine")


def test_the_brokers_secrets_are_copied_for_their_owner_only(device: Device) -> None:
    do(device, new_key().public, broker=Broker("127.0.0.1", 1, "edge", b"xyzzy7\n"))
    state = Path(device.state)
    assert (state / "mqtt-password").read_text() == "xyzzy7\n"
    assert (state / "mqtt-password").stat().st_mode & 0o777 == 0o600
    config = (state / "config.toml").read_text()
    assert f'password_file = "{state}/mqtt-password"' in config
    assert "xyzzy7" not in config


def test_another_broker_does_not_get_the_password_of_the_old_broker(device: Device, tmp_path: Path) -> None:
    key = new_key().public
    do(device, key, broker=Broker("127.0.0.1", 1, "edge", b"xyzzy7\n"))
    do(device, key, broker=Broker("127.0.0.1", 1))
    config = Path(device.state) / "config.toml"
    assert 'username = "edge"' in config.read_text()  # the same broker: the earlier options still apply
    do(device, key, broker=Broker("127.0.0.1", 2))
    assert not {"username", "password_file"} & set(tomlkit.parse(config.read_text()).unwrap()["mqtt"])


def test_a_missing_option_does_not_turn_off_tls_to_the_same_broker(device: Device) -> None:
    key, config = new_key().public, Path(device.state) / "config.toml"
    do(device, key, broker=Broker("127.0.0.1", 8883, tls=True))
    before = config.read_text()
    for port in (8883, 1883):
        with pytest.raises(ConfigInvalid, match="with TLS: add --mqtt-tls"):
            do(device, key, broker=Broker("127.0.0.1", port, "edge", b"xyzzy7"))
    assert config.read_text() == before
    do(device, key, broker=Broker("127.0.0.1", 1883), settings={"mqtt": {"tls": False}})
    assert tomlkit.parse(config.read_text()).unwrap()["mqtt"]["tls"] is False


def test_an_address_that_the_http_server_would_refuse_is_refused_before_it_is_written(device: Device) -> None:
    key, config = new_key().public, Path(device.state) / "config.toml"
    do(device, key)
    before = config.read_text()
    for listen in ("0.0.0.0:8000", "127.0.0.1:80a"):
        with pytest.raises(ConfigInvalid, match=f"listen = '{listen}'"):
            do(device, key, settings={"http": {"listen": listen}})
    assert config.read_text() == before


def test_a_stopped_daemon_is_started_and_this_is_reported(device: Device) -> None:
    key = new_key().public
    do(device, key)
    RemoteDaemon(open_transport(device), device).call("stop")
    again = do(device, key)
    assert again.changed == ["daemon started"]
    assert again.status.daemon.running


def test_after_a_cut_before_the_restart_the_next_bootstrap_restarts_the_daemon(device: Device) -> None:
    """After the cut, all files are correct, but the daemon still runs with the old files."""
    key = new_key().public
    before = do(device, key).status.daemon.pid
    (Path(device.state) / "restart-due").touch()
    again = do(device, key)
    assert again.changed == ["daemon restarted"]
    assert again.status.daemon.pid != before
    assert do(device, key).changed == []


def test_a_bootstrap_does_not_cut_off_the_watch_of_a_trial(tmp_path: Path) -> None:
    """A restart of the daemon would end the watch, and the device would roll the version back."""
    board = Board(tmp_path)
    here = Device("here", "local", str(board.state.root), PROFILE.name, str(board.state.root))
    do(here, board.key.public)
    try:
        board.put()
        store = board.stage(release=2)
        store.activate(60.0, TrialLimits({}, 600.0, unattended=True))
        board.sync("echo")
        wait_until(lambda: (store.read().limits or TrialLimits({})).started, "the daemon watches the version")
        with pytest.raises(DeployUnderWay, match=r"release 2 of echo for \d+ s more, .*edgert rollback echo here"):
            do(here, board.key.public, settings={"serving": {"window_s": 10.0}})
        assert (store.read().state, store.read().rolled_back) == ("trial", None)
    finally:
        board.stop()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"serving": {"windows_s": 1.0}}, "'windows_s'"),
        ({"serving": {"window_s": "1"}}, "float"),
        ({"colour": 1}, "colour"),
    ],
)
def test_invalid_settings_are_refused_before_a_device_is_asked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says) as caught:
        check_settings(settings)
    assert "--set" in caught.value.message
    check_settings({"serving": {"window_s": 1.0}, "models": {"digits": {"pinned": True}}})


def test_a_dead_broker_is_reported_in_the_status(device: Device) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = do(device, new_key().public, broker=Broker("127.0.0.1", port))
    connection = done.status.telemetry.connection
    assert (connection.state, f"127.0.0.1:{port}" in connection.text) == ("telemetry.broker_unreachable", True)


def test_a_bootstrap_ends_once_the_device_is_connected_to_its_broker(device: Device, tmp_path: Path) -> None:
    with RunningBroker.in_folder(tmp_path / "broker") as broker:
        done = do(device, new_key().public, broker=Broker("127.0.0.1", broker.port))
        assert done.status.telemetry.connection.state == CONNECTED


def test_an_engine_that_does_not_exist_is_refused_before_a_device_is_asked() -> None:
    with pytest.raises(ConfigInvalid, match="warp-drive"):
        BootstrapOptions((), engines="null,warp-drive")


def test_the_error_names_an_engine_that_does_not_load_on_the_device(device: Device) -> None:
    options = BootstrapOptions((new_key().public,), engines="tensorrt")
    with pytest.raises(EngineMissing, match="apt-get install tensorrt"):
        bootstrap(device, OTHER_ENGINE_PROFILE, options, open_transport(device))


def test_a_python_that_edgert_cannot_run_on_is_refused_before_a_wheel_is_sent(tmp_path: Path) -> None:
    """Example: a Python built without the headers of SQLite. The daemon would end with an error in edgert."""
    (tmp_path / "python3").write_text("#!/bin/sh\necho python=3.13 64 _ctypes,_sqlite3\n")
    (tmp_path / "python3").chmod(0o755)
    for name in ("sh", "cat", "mkdir", "chmod", "rm", "mv", "uname", "id", "sed", "dirname", "grep", "ls", "tr"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    with running_sshd(tmp_path / "sshd", path=str(tmp_path)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgert_deploy.devices.facts._PROBE", _PROBE.replace("/python3.1[0-9]", "/none"))
        with pytest.raises(DeviceError, match=r"python3 on board was built without _ctypes, _sqlite3\. Install"):
            do(server.device(), new_key().public)


def test_bootstrap_refuses_systemd_on_a_device_where_systemd_does_not_run(device: Device) -> None:
    with pytest.raises(DeviceError, match="--service monitor"):
        do(device, new_key().public, service="systemd")


def test_units_are_written_if_systemd_runs() -> None:
    board = Device("board", "ssh", "pi@board", "raspberry-pi-4", "/home/pi/my state", home="/home/pi/e")
    user = unit_for(board, PI_4)
    assert user is not None
    assert user.user
    assert user.path == "/home/pi/.config/systemd/user/edgertd.service"
    assert 'ExecStart=/home/pi/e/venv/bin/edgertd --state "/home/pi/my state" serve' in user.text
    root = unit_for(board, type(PI_4)(**{**vars(PI_4), "uid": 0}))
    assert root is not None
    assert root.path == "/etc/systemd/system/edgertd.service"
    assert 'ReadWritePaths="/home/pi/my state"' in root.text
    assert serves(board) in root.text
    assert serves(replace(board, state="/home/pi/my")) not in root.text
    assert unit_for(board, type(PI_4)(**{**vars(PI_4), "systemd": False})) is None
