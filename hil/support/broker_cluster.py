"""A real cluster of brokers on loopback: three RabbitMQ nodes with the MQTT plugin behind HAProxy.

It runs the configuration of examples/telemetry/cluster.

with BrokerCluster(folder) as cluster:
    settings = cluster.settings             # through HAProxy, like devices and subscribers
    cluster.kill(1)                         # kill -9; HAProxy notices within a second
    cluster.start(1)                        # the node joins the others again on its own

Folders, ports, the cookie and the port mapper (epmd) belong to this cluster alone. Processes are ended by their id.
Debian: apt-get install rabbitmq-server haproxy
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from edgert.errors import EdgeRTError
from edgert.telemetry.mqtt import Connection, MqttSettings
from tests.support.devices import wait_until
from tests.support.paths import ROOT
from tests.support.servers.ports import free_port

NODES = 3
STARTS_WITHIN_S = 300.0  # three Erlang machines on two busy cores
STOPS_WITHIN_S = 30.0
_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # Debian's wrapper uses the system's folders

_SHIPPED = ROOT / "examples" / "telemetry" / "cluster"


def why_not() -> str:
    """Return the reason why no such cluster can run here, or "" if one can."""
    missing = [name for name, there in (("rabbitmq-server", _SERVER.exists()), ("haproxy", _haproxy())) if not there]
    return f"not installed: apt-get install {' '.join(missing)}" if missing else ""


@dataclass
class BrokerCluster:
    """Three nodes and a load balancer; `start` and `kill` take the number of a node, from 0."""

    folder: Path
    port: int = field(default_factory=free_port)
    _ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(NODES)])
    _epmd_port: int = field(default_factory=free_port)
    _nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def settings(self) -> MqttSettings:
        return MqttSettings("127.0.0.1", self.port)

    def node(self, number: int) -> MqttSettings:
        """Return the settings of a node itself, without the balancer."""
        return MqttSettings("127.0.0.1", self._ports[number])

    def start(self, number: int) -> None:
        """Start a node, and wait until it accepts devices."""
        self._launch(number)
        wait_until(lambda: self._serves(number), f"node {number} serves; see {self._home(number)}/log", STARTS_WITHIN_S)

    def kill(self, number: int) -> None:
        """Kill a node with SIGKILL: it has no time to hand anything over."""
        node = self._nodes.pop(number)
        os.killpg(node.pid, signal.SIGKILL)
        node.wait(STOPS_WITHIN_S)

    def _launch(self, number: int) -> None:
        home = self._home(number)
        home.mkdir(parents=True, exist_ok=True)
        here = {f"rabbit@broker-{n + 1}": self._name(n) for n in range(NODES)}
        here["0.0.0.0:1883"] = f"127.0.0.1:{self._ports[number]}"
        (home / "rabbitmq.conf").write_text(_shipped("rabbitmq.conf", here))
        (home / "plugins").write_text("[rabbitmq_mqtt].\n")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))},
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_NODENAME": self._name(number),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(home / "data"),
            "RABBITMQ_LOG_BASE": str(home / "log"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "generated"),
            "RABBITMQ_PID_FILE": str(home / "pid"),
            # One scheduler and no spinning: three nodes share this machine with the tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}",
        }
        with open(home / "said", "ab") as said:
            self._nodes[number] = subprocess.Popen(
                [str(_SERVER)], env=environment, cwd=home, stdout=said, stderr=said, start_new_session=True
            )

    def _serves(self, number: int) -> bool:
        assert self._nodes[number].poll() is None, (self._home(number) / "said").read_text()[-2000:]
        connection = Connection(self.node(number), f"probe-{number}")
        try:
            connection.open()
        except EdgeRTError:
            return False
        connection.close()
        return True

    def _home(self, number: int) -> Path:
        return self.folder / f"node-{number}"

    def _name(self, number: int) -> str:
        return f"edgert-{self._epmd_port}-{number}@localhost"

    def __enter__(self) -> BrokerCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        cookie = self.folder / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        try:
            mapper = ["epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1"]
            self._others.append(subprocess.Popen(mapper))
            wait_until(lambda: _listens(self._epmd_port), "the port mapper listens")
            for number in range(NODES):
                self._launch(number)
            for number in range(NODES):
                said = f"node {number} serves; see {self._home(number)}/log"
                wait_until(lambda number=number: self._serves(number), said, STARTS_WITHIN_S)  # type: ignore[misc]
            self._balance()
        except BaseException:
            self._stop()
            raise
        return self

    def _balance(self) -> None:
        here = {f"broker-{n + 1}:1883": f"127.0.0.1:{port}" for n, port in enumerate(self._ports)}
        file = self.folder / "haproxy.cfg"
        file.write_text(_shipped("haproxy.cfg", {**here, "0.0.0.0:1883": f"127.0.0.1:{self.port}"}))
        haproxy = _haproxy()
        assert haproxy
        with open(self.folder / "haproxy.log", "wb") as log:
            self._others.append(subprocess.Popen([haproxy, "-db", "-f", str(file)], stdout=log, stderr=log))
        wait_until(lambda: _listens(self.port), f"HAProxy listens; see {self.folder}/haproxy.log")

    def _stop(self) -> None:
        for number in list(self._nodes):
            self.kill(number)
        for process in reversed(self._others):
            process.terminate()
            process.wait(STOPS_WITHIN_S)
        self._others.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()


def _shipped(name: str, here: dict[str, str]) -> str:
    """Return a file of examples/telemetry/cluster with this machine's names and addresses."""
    text = (_SHIPPED / name).read_text()
    for theirs, ours in here.items():
        assert theirs in text, f"{name} names no {theirs}"
        text = text.replace(theirs, ours)
    return text


def _haproxy() -> str | None:
    return shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
