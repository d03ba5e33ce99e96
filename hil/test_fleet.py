"""Ten containers and one host: a rollout to all, a device that is dead, a host that dies in the middle of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgert_deploy.remote import RemoteDaemon
from edgert_deploy.transports import open_transport
from hil.containers import Container, running_container
from hil.dut import Dut
from hil.host import _MAIN, ROOT, Host
from tests.bundles import make_null_bundle
from tests.devices import wait_until

DEVICES = 10
PROFILE = "generic-x86-64"
TRIAL_S = 15

pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True)
class Fleet:
    """Bootstrapped devices on which release 1 of `echo` serves."""

    host: Host
    containers: dict[str, Container]

    def bundle(self, release: int, **options: object) -> Path:
        return make_null_bundle(self.host.folder, self.host.key, release=release, profile=PROFILE, **options)  # type: ignore[arg-type]

    def states(self) -> dict[str, tuple[str, int]]:
        """Device -> state of its slots, and the release that is live."""
        with ThreadPoolExecutor(DEVICES) as pool:
            return dict(zip(self.containers, pool.map(self._state, self.containers), strict=True))

    def _state(self, name: str) -> tuple[str, int]:
        transport = open_transport(self.host.device(name))
        try:
            (echo,) = RemoteDaemon(transport, self.host.device(name)).status()["models"]
            return echo["state"], echo["active"]["release"]
        finally:
            transport.close()


@pytest.fixture(scope="module")
def fleet(containers_run: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One device is bootstrapped from nothing; the others start from what that left on its disk."""
    host = Host(tmp_path_factory.mktemp("host"))
    host.edgert("keys", "new")
    first = tmp_path_factory.mktemp("first")
    with running_container(first) as container:
        host.add(Dut("first", PROFILE, container.address, container.fingerprint, identity=str(container.client_key)))
        host.edgert("bootstrap", "first", "--engine", "null")
    host.edgert("device", "remove", "first")
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        folders = [tmp_path_factory.mktemp(f"unit-{n}") for n in range(DEVICES)]
        entered = pool.map(lambda folder: stack.enter_context(running_container(folder, (first,))), folders)
        containers = {f"unit-{n}": container for n, container in enumerate(entered)}
        for name, each in containers.items():
            host.add(Dut(name, PROFILE, each.address, each.fingerprint, identity=str(each.client_key)))
        host.edgert("bootstrap", "all", "--engine", "null")
        made = Fleet(host, containers)
        host.edgert("deploy", made.bundle(1), "--to", "all")
        assert set(made.states().values()) == {("steady", 1)}
        yield made


def test_a_device_without_a_link_holds_up_no_other_and_takes_the_release_later(fleet: Fleet) -> None:
    fleet.containers["unit-3"].link(up=False)
    told = fleet.host.edgert("deploy", fleet.bundle(2), "--to", "all", code=6)
    results = {row["device"]: row["result"] for row in told["devices"]}
    assert results.pop("unit-3") == "failed"
    assert set(results.values()) == {"live"}
    fleet.containers["unit-3"].link(up=True)
    told = fleet.host.edgert("deploy", fleet.bundle(2), "--to", "all")
    assert {row["device"]: row["result"] for row in told["devices"]}["unit-3"] == "live"
    assert set(fleet.states().values()) == {("steady", 2)}


def test_a_bad_release_goes_back_on_every_device(fleet: Fleet) -> None:
    fleet.host.edgert("deploy", fleet.bundle(3, golden_off_by=1.0), "--to", "all", code=9)
    assert set(fleet.states().values()) == {("steady", 2)}


def test_after_a_host_died_in_the_middle_each_device_decides_for_itself(fleet: Fleet) -> None:
    """SIGKILL once the first devices are on trial: old or new, never in between, and a second host command ends it."""
    before = set(fleet.states().values())
    assert before == {("steady", 2)}
    words = ["deploy", str(fleet.bundle(4)), "--to", "all", "--trial-s", str(TRIAL_S)]
    environment = {**os.environ, "EDGERT_CONFIG_DIR": str(fleet.host.folder), "PYTHONUNBUFFERED": "1"}
    host = subprocess.Popen(
        [sys.executable, "-c", _MAIN, *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert host.stderr is not None
    for line in host.stderr:
        if line.rstrip().endswith("check"):
            break
    host.kill()
    host.wait()
    host.stderr.close()
    left = fleet.states()
    print(f"\nwhen the host died: {sorted(left.values())}")
    wait_until(
        lambda: all(state in ("steady", "staged") for state, _ in fleet.states().values()), "every trial ended", 120
    )
    assert {release for _, release in fleet.states().values()} <= {2, 4}
    until = time.monotonic() + 180
    while True:  # what the dead host claimed is given up after a while
        code = 0
        try:
            fleet.host.edgert("deploy", fleet.bundle(4), "--to", "all")
            break
        except AssertionError:
            code = 1
        assert time.monotonic() < until, f"the release cannot be deployed after a host died: {code}"
        time.sleep(3)
    assert set(fleet.states().values()) == {("steady", 4)}


def test_a_power_cut_of_half_the_fleet_in_a_rollout_leaves_whole_versions(fleet: Fleet) -> None:
    serving = {release for _, release in fleet.states().values()}
    victims = [fleet.containers[f"unit-{n}"] for n in range(0, DEVICES, 2)]
    bundle = fleet.bundle(6, padding_bytes=2_000_000)
    words = ["deploy", str(bundle), "--to", "all", "--trial-s", str(TRIAL_S)]
    environment = {**os.environ, "EDGERT_CONFIG_DIR": str(fleet.host.folder), "PYTHONUNBUFFERED": "1"}
    host = subprocess.Popen(
        [sys.executable, "-c", _MAIN, *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert host.stderr is not None
    for line in host.stderr:
        if "activate" in line:
            break
    with ThreadPoolExecutor(DEVICES) as pool:
        list(pool.map(Container.cycle, victims))
    host.stderr.read()
    assert host.wait(300) != 0
    wait_until(
        lambda: all(state in ("steady", "staged") for state, _ in fleet.states().values()), "every trial ended", 120
    )
    assert {release for _, release in fleet.states().values()} <= {*serving, 6}
