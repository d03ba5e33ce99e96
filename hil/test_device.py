"""The whole path on a device under test: bootstrap, deploy, right answers, second release, rollback, reboot, power cut.

    make hil DUT=hil/duts/my-board.toml

A board keeps the runtime and the last live release. Tests are skipped, with the reason, where nothing can cut the
power or no service manager starts the daemon.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import EdgeRTError
from edgert_deploy.devices.facts import probe
from edgert_deploy.devices.profiles import DeviceProfile, load_profile
from edgert_deploy.devices.transports import open_transport
from hil.support.dut import Bench, Dut, opened, read_dut, why_not
from hil.support.host import Host
from tests.support.bundles import make_null_bundle
from tests.support.devices import wait_until
from tests.support.paths import DIGITS, ROOT

DUT_FILE = Path(os.environ.get("EDGERT_DUT", ROOT / "hil/duts/container.toml"))
COMMAND_S_MAX = 3600
BACK_S_MAX = 900.0  # for the boot of a board, which may be emulated
TRIAL_S = 900  # a command takes minutes on an emulated processor of a busy machine
ACCURACY_MIN = 0.98

pytestmark = pytest.mark.timeout(COMMAND_S_MAX)


@dataclass(frozen=True)
class UnderTest:
    """One device, bootstrapped from nothing by one host."""

    host: Host
    bench: Bench
    profile: DeviceProfile
    bootstrapped: dict[str, Any]

    @property
    def dut(self) -> Dut:
        return self.bench.dut

    @property
    def systemd(self) -> bool:
        return bool(self.bootstrapped["service"] == "systemd")

    def deploy(self, release: int, *words: str, code: int = 0) -> dict[str, Any]:
        bundle = self.host.digits(self.profile.name, release)
        return self.host.edgert("deploy", bundle, self.dut.name, "--trial", f"{TRIAL_S}s", *words, code=code)

    def live(self) -> dict[str, Any]:
        return self.host.model(self.dut.name, "digits")

    def accuracy(self) -> dict[str, Any]:
        """Return the hold-out accuracy, computed by a client on the device."""
        device = self.host.device(self.dut.name)
        transport = open_transport(device)
        try:
            socket = self.bootstrapped["status"]["socket"]
            folder = f"{device.state}/incoming"
            for file in (ROOT / "hil/on_device/accuracy.py", DIGITS / "holdout.npz"):
                transport.put(file, f"{folder}/{file.name}")
            python = f"{device.home}/venv/bin/python"
            result = transport.run([python, f"{folder}/accuracy.py", socket, f"{folder}/holdout.npz"], COMMAND_S_MAX)
            assert result.ok, result.failure_text()
            return dict(json.loads(result.stdout))
        finally:
            transport.close()

    def boot_id(self) -> str:
        return self.host.on(self.dut.name, "cat", "/proc/sys/kernel/random/boot_id").stdout.strip()

    def wait_until_it_serves(self, boot_before: str) -> None:
        """Wait until the device has booted again and the daemon has loaded every model."""

        def serves() -> bool:
            try:
                if self.boot_id() == boot_before:
                    return False
                return (self.live().get("serving") or {}).get("state") in ("ready", "degraded")
            except (AssertionError, EdgeRTError, StopIteration):
                time.sleep(0.5)
                return False

        wait_until(serves, "the device serves again after it booted", BACK_S_MAX, pause_s=1.0)


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnderTest]:
    dut = read_dut(DUT_FILE)
    if dut.virtual == "container":
        request.getfixturevalue("containers_run")
    if reason := why_not(dut):
        (pytest.fail if os.environ.get("EDGERT_HIL_REQUIRED") else pytest.skip)(f"no {dut.virtual} here: {reason}")
    with opened(dut, tmp_path_factory.mktemp("device")) as bench:
        host = Host(tmp_path_factory.mktemp("host"))
        host.edgert("keys", "new")
        host.add(bench.dut)
        # A loopback device is this machine: leave no unit in its systemd.
        (done,) = host.edgert("bootstrap", dut.name, *(("--service", "monitor") if dut.virtual == "sshd" else ()))[
            "devices"
        ]
        yield UnderTest(host, bench, load_profile(dut.profile, ROOT / "devices"), done)
        if dut.virtual == "sshd":
            host.edgertd(dut.name, "stop")


def test_the_first_engine_of_the_profile_gives_right_answers(device: UnderTest) -> None:
    device.deploy(1)
    measured = device.accuracy()
    print(f"\n{device.dut.name}: {measured}")
    assert measured["engine"] == device.profile.engines[0]
    assert measured["accuracy"] >= ACCURACY_MIN
    assert device.live()["serving"]["degraded"] is False


def test_bench_measures_a_bundle_and_the_live_version(device: UnderTest) -> None:
    device.deploy(1)
    bundle = device.host.digits(device.profile.name, 2)
    for what, how_long in ((bundle, "1s"), ("digits", "2s")):
        (told,) = device.host.edgert("bench", what, device.dut.name, "--for", how_long)["devices"]
        print(f"\n{device.dut.name}: {told}")
        assert told["results"][-1]["id"].startswith("live: ")
        assert all(one["p99_ms"] > 0 for one in told["results"] if "error" not in one)
    left = device.host.on(device.dut.name, "ls", f"{device.host.device(device.dut.name).state}/incoming").stdout
    assert "bench-" not in left


def test_a_second_bootstrap_changes_nothing(device: UnderTest) -> None:
    if device.dut.virtual == "sshd":
        pytest.skip("tests/end_to_end/test_ssh.py has it")
    (again,) = device.host.edgert("bootstrap", device.dut.name)["devices"]
    assert again["changed"] == []
    assert again["status"]["daemon"]["running"] is True


def test_a_second_release_becomes_live_and_a_rollback_restores_the_first(device: UnderTest) -> None:
    """Every board meets these limits, which the daemon measures within its sandbox."""
    told = device.deploy(2, "--limit", "p99_ms=60000", "--limit", "error_share=0", "--watch", "3s")
    assert told["devices"][0]["watched"]["readings"]["golden"] > 0
    assert device.live()["live"]["release"] == 2
    device.host.edgert("rollback", "digits", device.dut.name)
    assert device.live()["live"]["release"] == 1
    assert device.accuracy()["accuracy"] >= ACCURACY_MIN


def test_an_older_release_is_refused(device: UnderTest) -> None:
    device.deploy(2)
    device.deploy(1, code=5)
    assert device.live()["live"]["release"] == 2


def test_a_release_that_breaks_a_limit_is_rolled_back_by_the_device(device: UnderTest) -> None:
    device.deploy(2)
    told = device.deploy(3, "--limit", "p99_ms=0.0001", "--watch", "3s", code=9)
    assert "above its limit of 0.0001 ms" in told["devices"][0]["error"]["message"]
    assert device.live()["live"]["release"] == 2
    assert "p99_ms is" in device.live()["rolled_back"]["reason"]


def test_a_release_with_wrong_answers_is_rolled_back(device: UnderTest) -> None:
    """The engine does not give the signed golden answers. Only the device can notice this."""
    device.deploy(2)
    bad = make_null_bundle(
        device.host.folder, device.host.key, "digits", 9, profile=device.profile.name, golden_off_by=1.0
    )
    told = device.host.edgert("deploy", bad, device.dut.name, "--trial", f"{TRIAL_S}s", code=9)
    assert told["devices"][0]["serving"] == 2
    assert device.live()["live"]["release"] == 2
    assert device.accuracy()["accuracy"] >= ACCURACY_MIN


def test_after_a_reboot_the_device_serves_without_an_operator(device: UnderTest) -> None:
    if not device.systemd:
        pytest.skip("no systemd on this device: nothing starts the daemon after a reboot")
    device.deploy(2)
    before = device.boot_id()
    transport = open_transport(device.host.device(device.dut.name))
    facts = probe(transport, device.dut.name)
    try:
        transport.run([*(() if facts.uid == 0 else ("sudo", "-n")), "systemctl", "reboot"], 60)
    except EdgeRTError:
        pass  # the reboot ends the connection
    finally:
        transport.close()
    device.wait_until_it_serves(before)
    assert device.live()["live"]["release"] == 2
    assert device.accuracy()["accuracy"] >= ACCURACY_MIN


def test_a_power_cut_during_a_trial_restores_the_good_release(device: UnderTest) -> None:
    if device.bench.switch is None or not device.systemd:
        pytest.skip("nothing can cut this device's power (`power` in its TOML), or no systemd starts its daemon again")
    device.deploy(2)
    name, host = device.dut.name, device.host
    there = f"{host.device(name).state}/incoming/trial.edgert"
    transport = open_transport(host.device(name))
    transport.put(host.digits(device.profile.name, 3), there)
    transport.close()
    host.edgertd(name, "install", there)
    host.edgertd(name, "activate", "digits", "--trial", "1h")
    assert device.live()["live"]["release"] == 3
    before = device.boot_id()
    device.bench.switch.cycle()
    device.wait_until_it_serves(before)
    assert device.live()["live"]["release"] == 2
    assert device.live()["state"] == "steady"
    assert device.accuracy()["accuracy"] >= ACCURACY_MIN
