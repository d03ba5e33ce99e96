"""The service units in a container with systemd, as root and as another user.

tests/host/devices/test_service.py tests the units without starting them.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import DeviceError, EdgeRTError
from edgert.protocol import control
from edgert.state_dir import StateDir
from edgert.telemetry.messages import MetricsMessage, Topic
from edgert_deploy.fleet.listener import FleetListener
from edgert_deploy.fleet.reports import EventMessage
from edgert_deploy.fleet.subscriber import FleetSubscriber
from hil.support import rootfs
from hil.support.containers import Container, running_container
from hil.support.dut import Dut, reached
from hil.support.host import Host
from tests.support.bundles import make_null_bundle
from tests.support.devices import wait_until
from tests.support.fleet import retained
from tests.support.servers.brokers import PASSWORD, USER, Broker, mosquitto
from tests.support.servers.ports import free_port
from tests.support.servers.registries import RegistryServer
from tests.support.trees import another_tree

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

    def serving(self, model: str) -> dict[str, Any]:
        """Return the daemon's status of a model, without a login: its socket is on the container's disk."""
        socket = StateDir(self.container.root / "var/lib/edgert").control_socket
        return dict(control.ask(socket, {"op": "status"}, 60.0)["models"][model])

    def serves(self, model: str) -> bool:
        try:
            return bool(self.serving(model)["state"] == "ready")
        except (EdgeRTError, OSError, KeyError):  # the daemon starts
            return False

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
            pause_s=0.5,
        )
        wait_until(lambda: self.serves("echo"), "it serves")


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
                "bootstrap", NAME, "--engines", "null", "--broker", f"{container.host_ip}:{port}",
                "--mqtt-username", USER, "--mqtt-password-file", folder / "password",
            )  # fmt: skip
            made_world = World(host, container, broker)
            made_world.deploy(1)
            yield made_world


def test_the_daemon_runs_as_a_user_without_rights_who_can_write_only_its_state(world: World) -> None:
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
    wait_until(lambda: f"u'{USER}'" in log.read_text(), "the device reports under its user")
    assert "not authorised" not in log.read_text()
    assert world.sh("stat -c '%U %a' /var/lib/edgert/mqtt-password") == "root 600"
    assert world.inside("cat /var/lib/edgert/mqtt-password >/dev/null 2>&1") != 0


def test_root_removes_a_key_that_the_daemon_cannot_change(world: World) -> None:
    key = world.host.key.public.key_id
    assert world.host.edgert("keys", "remove", key, NAME, "--force")["devices"][0]["keys"] == []
    (again,) = world.host.edgert("bootstrap", NAME, "--engines", "null")["devices"]
    assert again["changed"] == [f"key {key}"]
    for name in ("keys", "config.toml", f"keys/{world.sh('ls /var/lib/edgert/keys')}"):
        assert world.sh(f"stat -c %U /var/lib/edgert/{name}") == "root", name


def test_only_apps_of_the_group_may_connect(world: World) -> None:
    ask = '/opt/edgert/venv/bin/python -c \'from edgert import Client; print(Client("/run/edgert/edgert.sock").metadata("echo"))\''
    assert int(world.sh(f"runuser -u {rootfs.USER} -- {ask} >/dev/null 2>&1; echo $?")) != 0
    world.sh(f"usermod --append --groups edgert {rootfs.USER}")
    assert int(world.sh(f"runuser -u {rootfs.USER} -- {ask} >/dev/null; echo $?")) == 0


def test_systemd_restarts_a_killed_daemon_and_it_serves_again(world: World) -> None:
    pid = world.unit("MainPID")
    world.sh(f"kill -9 {pid}")
    world.wait_until_it_serves(pid)
    lines = world.host.edgert("logs", NAME, "--since", "1h")["lines"]
    assert any("status=9/KILL" in line for line in lines), "the journal, as systemd keeps the daemon"
    seen: list[dict[str, str]] = []

    def only_the_engine_is_missing() -> bool:
        """It was bootstrapped with the null engine only; the forwarder connects again meanwhile."""
        seen[:] = [one for one in world.host.edgert("doctor", NAME, code=7)["findings"] if one["where"] == NAME]
        return [one["check"] for one in seen if one["level"] != "ok"] == ["engine"]

    wait_until(only_the_engine_is_missing, "the doctor reports the engine alone", pause_s=1.0)
    assert {one["check"] for one in seen} >= {"reachable", "clock", "service", "socket", "keys", "telemetry", "model"}


def test_a_daemon_that_cannot_start_is_restarted_until_it_can(world: World) -> None:
    """No operator restarts the daemon, because systemd's own limit of starts is off."""
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


def test_the_refusal_of_a_start_or_stop_by_hand_names_the_command_of_the_unit(world: World) -> None:
    """A monitor would restart a second daemon, which competes with the unit's; systemd would restart a stopped one."""
    pid = world.unit("MainPID")
    with pytest.raises(DeviceError, match="systemctl stop edgertd"):
        world.host.edgertd(NAME, "stop")
    assert world.unit("MainPID") == pid
    refused = world.host.edgert("bootstrap", NAME, "--engines", "null", "--service", "monitor", code=7)
    assert f"edgert uninstall {NAME}" in refused["error"]["message"]
    world.sh("systemctl stop edgertd")
    try:
        with pytest.raises(DeviceError, match="systemctl start edgertd"):
            world.host.edgertd(NAME, "start")
        assert "monitor" not in world.sh("ps -eo args")
        assert world.host.edgertd(NAME, "stop") == {"stopped": False}
    finally:
        world.sh("systemctl start edgertd")
    world.wait_until_it_serves(pid)
    assert world.host.edgertd(NAME, "start")["pid"] == int(world.unit("MainPID"))


def test_the_watchdog_restarts_a_daemon_that_hangs(world: World) -> None:
    folder = "/run/systemd/system/edgertd.service.d"
    world.sh(f"mkdir -p {folder}; printf '[Service]\\nWatchdogSec=6\\n' >{folder}/quick.conf; systemctl daemon-reload")
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
    world.host.edgertd(NAME, "activate", "echo", "--trial", "10m")
    pid = world.unit("MainPID")
    world.sh(f"kill -9 {pid}")
    world.wait_until_it_serves(pid)
    assert world.host.model(NAME, "echo")["state"] == "trial"
    world.host.edgertd(NAME, "rollback", "echo")
    assert world.host.model(NAME, "echo")["live"]["release"] == 1


class Heard(FleetListener):
    """The events and the windows that the broker delivers while this is entered."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(lambda: time.time_ns() // 10**6)
        self.events: list[EventMessage] = []
        self.windows: list[MetricsMessage] = []
        self._subscriber = FleetSubscriber(broker.settings, [self])
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def on_event(self, topic: Topic, event: EventMessage, now: float) -> None:
        self.events.append(event)

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        self.windows.append(metrics)

    def _listen(self) -> None:
        while not self._left.is_set():
            self._subscriber.listen(0.2)

    def __enter__(self) -> Heard:
        self._subscriber.open()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._left.set()
        self._thread.join()
        self._subscriber.close()


ASK = "/opt/edgert/venv/bin/python -c 'import sys, numpy as np; from edgert import Client; "
LEAK = -66605.0  # edgert/engines/fault.py: leaks 10 MB


def test_a_model_serves_again_after_the_kernel_killed_its_worker_for_its_memory(world: World) -> None:
    host = world.host
    bundle = make_null_bundle(host.folder, host.key, "leaky", profile=PROFILE, engine="fault")
    host.edgert("deploy", bundle, NAME)
    daemon, other = world.unit("MainPID"), host.model(NAME, "echo")["serving"]["pid"]
    ask = f'{ASK}c = Client("/run/edgert/edgert.sock"); x = np.full((1, 4), {LEAK}, np.float32)\n'
    ask += '[c.infer("leaky", {"x": x}, cache=False) for _ in range(100)]\''
    with Heard(world.broker) as heard:
        with world.container.bounded("edgertd.service", "memory", 200 * 1024**2) as group:
            assert "WorkerLost" in world.sh(f"{ask} 2>&1; true")
            assert "oom_kill 1" in (group / "memory.oom_control").read_text()
            wait_until(lambda: world.serves("leaky"), "the model is back")
        wait_until(lambda: any(event.event == "crashed" for event in heard.events), "the event")
    assert (world.unit("MainPID"), host.model(NAME, "echo")["serving"]["pid"]) == (daemon, other)
    (crash,) = (event for event in heard.events if event.event == "crashed")
    assert (crash.model, "killed by signal 9" in str(crash.fields["reason"])) == ("leaky", True)


def test_a_lack_of_processes_ends_neither_the_daemon_nor_a_worker(world: World) -> None:
    """Without free processes, new clients are refused. Later, the daemon starts the ended worker again."""
    host = world.host
    daemon, pid = world.unit("MainPID"), host.model(NAME, "echo")["serving"]["pid"]
    ask = f'{ASK}c = [Client("/run/edgert/edgert.sock", timeout_s=%d) for _ in range(20)]; x = np.ones((1, 4), np.float32)\n'
    ask += '[each.infer("echo", {"x": x}, cache=False) for each in c]; print("served")\' 2>&1; true'
    with Heard(world.broker) as heard, world.container.bounded("edgertd.service", "pids", 0) as group:
        assert "the limit of threads is reached" in world.sh(ask % 10)  # it asks again until then
        assert host.model(NAME, "echo")["serving"]["pid"] == pid
        (group / "pids.max").write_text("1")  # the end of the worker makes no room
        world.sh(f"kill -9 {pid}")
        fault = "no worker can be started: Resource temporarily unavailable"
        # An event reports this before the third attempt; the next attempt then waits for 30 s. A status comes after a
        # second.
        wait_until(
            lambda: any(event.fields.get("reason") == fault for event in heard.events), "it says what is missing"
        )
    wait_until(lambda: world.serves("echo"), "the model is back")
    assert (world.unit("MainPID"), host.model(NAME, "echo")["live"]["release"]) == (daemon, 1)
    assert "served" in world.sh(ask % 60)


def test_a_jump_of_the_wall_clock_by_years_changes_only_timestamps(world: World) -> None:
    """Like a jump, libfaketime changes the daemon's wall clock but not its monotonic clock."""
    host, container = world.host, world.container
    folder = "/run/systemd/system/edgertd.service.d"
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
    shutil.copy(library, container.root / "opt" / library.name)
    clock = container.root / "opt" / "clock"
    clock.write_text("+0")
    made = {"LD_PRELOAD": f"/opt/{library.name}", "FAKETIME_TIMESTAMP_FILE": "/opt/clock", "FAKETIME_NO_CACHE": "1"}
    made |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_DISABLE_SHM": "1", "PYTHONPATH": "/opt/clocked"}
    (container.root / "opt/clocked").mkdir()
    # libfaketime answers EINVAL to clock_nanosleep, which is the time.sleep of Python 3.11 and later.
    sleep = "import select, time\ntime.sleep = lambda s: select.select([], [], [], s) and None\n"
    (container.root / "opt/clocked/sitecustomize.py").write_text(sleep)
    lines = "\\n".join(f"Environment={name}={value}" for name, value in made.items())
    world.sh(f"mkdir -p {folder}; printf '[Service]\\n{lines}\\n' >{folder}/clock.conf; systemctl daemon-reload")
    host.edgert("bootstrap", NAME, "--engines", "null", "--set", "serving.window_s=2")
    world.sh("systemctl restart edgertd")
    try:
        wait_until(lambda: world.serves("echo"), "it serves")
        bundle = make_null_bundle(host.folder, host.key, release=3, profile=PROFILE)
        (there := container.root / "var/lib/edgert/incoming/three.edgert").write_bytes(bundle.read_bytes())
        host.edgertd(NAME, "install", "/" + str(there.relative_to(container.root)))
        host.edgertd(NAME, "activate", "echo", "--trial", "1h")
        serving = host.model(NAME, "echo")["serving"]
        assert serving is not None, world.sh("systemctl status edgertd; journalctl -u edgertd -n 30; true")
        daemon, pid = world.unit("MainPID"), serving["pid"]
        ask = f'{ASK}c = Client("/run/edgert/edgert.sock"); x = np.ones((1, 4), np.float32)\n'
        ask += '[c.infer("echo", {"x": x}, cache=False, timeout_s=60) for _ in range(50)]; print("served")\' 2>&1; true'
        for offset, years in (("+3650d", 10), ("-7300d", -20), ("+0", 0)):
            clock.write_text(offset)
            with Heard(world.broker) as heard:
                wait_until(lambda: _of_year(heard.windows, years) >= 3, f"windows with the clock at {offset}")  # noqa: B023
            assert "served" in world.sh(ask)
            assert all(0 < window.window_s < 60 for window in heard.windows)
            found = host.model(NAME, "echo")
            assert (world.unit("MainPID"), found["serving"]["pid"], found["state"]) == (daemon, pid, "trial")
    finally:
        world.sh(f"rm -r {folder}; systemctl daemon-reload; systemctl restart edgertd")
    wait_until(lambda: world.serves("echo"), "it serves")
    assert host.model(NAME, "echo")["state"] == "trial"


def _of_year(windows: list[MetricsMessage], years: int) -> int:
    """Return how many windows have a time so many years from now."""
    return sum(abs((window.ts_ms / 1000 - time.time()) / 86400 / 365 - years) < 1 for window in windows)


def test_a_user_without_rights_gets_a_service_that_survives_a_reboot(world: World, tmp_path: Path) -> None:
    container = world.container
    host = Host(tmp_path)
    host.edgert("keys", "new")
    host.add(reached(Dut("mine", PROFILE), container, rootfs.USER))
    files_before = world.sh(f"ls -A /home/{rootfs.USER}").split()
    refused = host.edgert(
        "bootstrap", "mine", "--engines", "null", code=7
    )  # without polkit only root may enable lingering
    assert f"loginctl enable-linger {rootfs.USER}" in refused["error"]["message"]
    assert world.sh(f"ls -A /home/{rootfs.USER}").split() == files_before, "it was refused before anything was sent"
    world.sh(f"loginctl enable-linger {rootfs.USER}")
    (done,) = host.edgert("bootstrap", "mine", "--engines", "null")["devices"]
    assert done["service"] == "systemd"
    host.edgert("deploy", make_null_bundle(tmp_path, host.key, profile=PROFILE), "mine")
    with pytest.raises(DeviceError, match="systemctl --user stop edgertd"):
        host.edgertd("mine", "stop")
    host.on("mine", "sh", "-c", "XDG_RUNTIME_DIR=/run/user/$(id -u) systemctl --user stop edgertd")
    with pytest.raises(DeviceError, match="systemctl --user start edgertd"):
        host.edgertd("mine", "start")
    container.cycle()

    wait_until(lambda: host.is_ready("mine", "echo"), "the user's own daemon serves after a power cut", pause_s=2.0)
    _change_runtime_by_channel(host, container, tmp_path)
    wait_until(lambda: host.is_ready("mine", "echo"), "the daemon of the new runtime serves", pause_s=2.0)
    assert host.edgert("logs", "mine")["lines"], "its user may read its journal"
    wait_until(lambda: world.unit("ActiveState") == "active", "and so does the system's")
    assert world.host.model(NAME, "echo")["live"]["release"] == 1
    host.edgert("uninstall", "mine", "--purge", "--yes")
    assert world.sh(f"ls -A /home/{rootfs.USER}").split() == files_before
    assert world.sh("ls /var/lib/systemd/linger") == rootfs.USER  # root enabled lingering, so it stays


def _change_runtime_by_channel(host: Host, container: Container, folder: Path) -> None:
    """Let the user's device follow a channel with another edgert; wait until the other edgert is in use."""

    def in_use() -> str:
        return host.on("mine", "sh", "-c", f"basename $(readlink {host.device('mine').home}/venv)").stdout.strip()

    before = in_use()
    python = host.on("mine", "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").stdout.strip()
    with RegistryServer.in_folder(folder / "registry", host=container.host_ip) as registry:
        another = Host(host.folder, another_tree(folder / "another"))
        chosen = ("--profile", PROFILE, "--engines", "null", "--python", python, "--channel", "stable")
        (runtime,) = another.edgert("publish-runtime", 1, "--registry", registry.address, *chosen)["release"][
            "runtimes"
        ]
        soon = ("--set", "follow.interval_s=2")  # this is the longest wait for the first round, too
        host.edgert("bootstrap", "mine", "--engines", "null", "--follow", registry.address, *soon)
        wait_until(lambda: in_use() == runtime != before, "the device changed its runtime by itself", pause_s=1.0)
        wait_until(lambda: "is live" in _steps(host), "its follower says that the new runtime stays", pause_s=2.0)


def _steps(host: Host) -> str:
    """Return the result of the device's last round."""
    return " ".join(host.edgertd("mine", "status")["channel"]["steps"])


def test_an_uninstall_clears_the_messages_that_the_broker_retains_for_the_device(world: World) -> None:
    pid = world.unit("MainPID")
    add = 'sed -i "/^\\[mqtt\\]/a home_assistant = \\"homeassistant\\"" /var/lib/edgert/config.toml'
    world.sh(f"{add} && systemctl restart edgertd")
    world.wait_until_it_serves(pid)

    def known() -> set[str]:
        """The last parts of the retained topics."""
        return {topic.rpartition("/")[2] for topic in retained(world.broker)}

    wait_until(lambda: known() == {"status", "info", "deploy", "config"}, "it is known, including to Home Assistant")
    (shown,) = world.host.edgert("uninstall", NAME, "--dry-run")["devices"]
    # The next test needs no second installation.
    world.sh("mkdir /root/edgert && cp -al /opt/edgert/venvs /opt/edgert/runtime.sh /root/edgert/")
    (gone,) = world.host.edgert("uninstall", NAME, "--yes")["devices"]
    for removed in (shown["removed"], gone["removed"]):
        assert any("retains of" in what for what in removed), removed
    assert known() == set()


def test_a_device_with_a_monitor_keeps_it_until_an_operator_stops_it_and_asks_for_systemd(world: World) -> None:
    host = world.host
    world.sh("mv /root/edgert /opt/edgert")
    (done,) = host.edgert("bootstrap", NAME, "--engines", "null", "--service", "monitor")["devices"]
    assert (done["service"], done["runtime"]["sent_bytes"]) == ("monitor", 0)
    (again,) = host.edgert("bootstrap", NAME, "--engines", "null", "--set", "serving.window_s=30")["devices"]
    assert (again["service"], again["changed"]) == ("monitor", ["configuration"])
    refused = host.edgert("bootstrap", NAME, "--engines", "null", "--service", "systemd", code=7)
    assert "edgertd --state /var/lib/edgert stop" in refused["error"]["message"]
    assert host.edgertd(NAME, "stop")["stopped"]
    (moved,) = host.edgert("bootstrap", NAME, "--engines", "null", "--service", "systemd")["devices"]
    assert (moved["service"], world.unit("ActiveState")) == ("systemd", "active")
