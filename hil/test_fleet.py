"""Six containers and one host: waves, a dead device, a failing device, a host that is killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import Interrupted
from edgert.versions.slot_store import SlotStore
from edgert_deploy.devices.transports import open_transport
from hil.support.containers import Container, running_container
from hil.support.dut import Dut, reached
from hil.support.host import Host
from tests.support.bundles import make_null_bundle
from tests.support.devices import wait_until

DEVICES = 6
HALF = DEVICES // 2
PROFILE = "generic-x86-64"
TRIAL_S = 30
COMMAND_S_MAX = 300.0
_APP = """
import contextlib, os, sys, time
import numpy as np
from edgert import Client, EdgeRTError
open("/root/asks", "w").close()
with Client("/run/edgert/edgert.sock") as client:
    while not os.path.exists("/tmp/enough"):
        with contextlib.suppress(EdgeRTError):
            client.infer("echo", np.full((1, 4), float(sys.argv[1]), np.float32), cache=False)
        time.sleep(0.01)
"""

pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True)
class Fleet:
    """Bootstrapped devices on which release 1 of `echo` is live."""

    host: Host
    containers: dict[str, Container]

    def bundle(self, release: int, **options: object) -> Path:
        return make_null_bundle(self.host.folder, self.host.key, release=release, profile=PROFILE, **options)  # type: ignore[arg-type]

    def states(self) -> dict[str, tuple[str, int]]:
        """Return the slot state and the live release of each device, as its disk says."""
        slots = {
            name: SlotStore(each.root / "var/lib/edgert/models/echo").read() for name, each in self.containers.items()
        }
        return {name: (each.state.value, each.live.release if each.live else 0) for name, each in slots.items()}

    def wait_for_trials(self) -> None:
        """Wait until no device is on trial. Without its host, a device decides alone."""
        wait_until(lambda: {state for state, _ in self.states().values()} <= {"steady", "staged"}, "no trial")

    @contextmanager
    def asking(self, name: str, value: float) -> Iterator[None]:
        """Run an app on the device that asks `echo` for `value` again and again."""
        transport = open_transport(self.host.device(name))
        program = [f"{self.host.device(name).home}/venv/bin/python", "-c", _APP, str(value)]
        with ThreadPoolExecutor(1) as pool:
            app = pool.submit(transport.run, program, COMMAND_S_MAX)
            begun = self.containers[name].root / "root/asks"
            try:
                wait_until(lambda: begun.exists() or app.done(), "the app asks")
                yield
            finally:
                self.host.on(name, "touch", "/tmp/enough")
                assert app.result().ok, app.result().failure_text()
                transport.close()


def results(told: dict[str, Any]) -> dict[str, str]:
    """Return the result of each device in a rollout."""
    return {row["device"]: row["result"] for row in told["devices"]}


def read_until(host: subprocess.Popen[str], word: str) -> None:
    """Wait for a line of progress that contains `word`."""
    assert host.stderr is not None
    for line in host.stderr:
        if word in line:
            return
    raise AssertionError(f"the command ended without the line {word!r}")


@pytest.fixture(scope="module")
def fleet(containers_run: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Bootstrap one bare device and deploy to it. The other devices start from a copy of its disk."""
    host = Host(tmp_path_factory.mktemp("host"))
    host.edgert("keys", "new")
    first = tmp_path_factory.mktemp("first")
    with running_container(first) as container:
        host.add(reached(Dut("first", PROFILE), container))
        host.edgert("bootstrap", "first", "--engines", "null")
        first_release = make_null_bundle(host.folder, host.key, profile=PROFILE)
        host.edgert("deploy", first_release, "first")
    host.edgert("device", "remove", "first")
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        folders = [tmp_path_factory.mktemp(f"unit-{n}") for n in range(DEVICES)]
        entered = pool.map(lambda folder: stack.enter_context(running_container(folder, (first,))), folders)
        containers = {f"unit-{n}": container for n, container in enumerate(entered)}
        for name, each in containers.items():
            host.add(reached(Dut(name, PROFILE), each))
        host.edgert("bootstrap", "all", "--engines", "null")
        made = Fleet(host, containers)
        assert set(made.states().values()) == {("steady", 1)}
        yield made


def test_waves_stop_at_an_unreachable_device_unless_max_failures_allows_it(fleet: Fleet) -> None:
    """A dead device does not delay its wave; --max-failures decides whether the next wave begins."""
    fleet.containers["unit-2"].link(up=False)
    in_waves = ("all", "--canary", 1, "--wave", "10%,50%,100%")
    told = fleet.host.edgert("deploy", fleet.bundle(2), *in_waves, "--max-failures", "10%", code=6)
    assert told["rollout"]["state"] == "stopped"
    assert f"1 of {HALF} devices failed" in told["rollout"]["reason"]
    assert results(told) == {
        **dict.fromkeys(["unit-0", "unit-1"], "live"), "unit-2": "failed",
        **dict.fromkeys([f"unit-{n}" for n in range(HALF, DEVICES)], "not-begun"),
    }  # fmt: skip
    told = fleet.host.edgert("deploy", fleet.bundle(2), *in_waves, "--max-failures", 1, code=6)
    assert (told["rollout"]["state"], told["rollout"]["left"]) == ("done", ["unit-2"])
    fleet.containers["unit-2"].link(up=True)
    told = fleet.host.edgert("rollout", "resume")
    assert results(told)["unit-2"] == "live"
    assert set(fleet.states().values()) == {("steady", 2)}


def test_a_bad_release_is_rolled_back_on_every_device(fleet: Fleet) -> None:
    fleet.host.edgert("deploy", fleet.bundle(3, golden_off_by=1.0), "all", code=9)
    assert set(fleet.states().values()) == {("steady", 2)}


def test_a_device_that_breaks_a_limit_is_rolled_back_and_the_waves_stop(fleet: Fleet) -> None:
    """Only the app of one device sends a value on which the release fails. The test then aborts the rollout."""
    fails_at_7 = {"engine": "fault", "program": {"runs": [{"fault": "raise", "value": 7.0}]}}
    words = ("--canary", 1, "--wave", "50%,100%", "--limit", "error_share=5%", "--watch", "4s")
    with fleet.asking("unit-2", 7.0):
        told = fleet.host.edgert("deploy", fleet.bundle(4, **fails_at_7), "all", *words, code=9)
    (row,) = [row for row in told["devices"] if row["device"] == "unit-2"]
    assert row["error"]["code"] == "deploy.rolled_back"
    assert "error_share is" in row["error"]["message"]
    assert told["rollout"]["state"] == "stopped"
    live = {name for name, result in results(told).items() if result == "live"}
    assert "unit-0" in live
    assert live <= {f"unit-{n}" for n in range(HALF)} - {"unit-2"}
    assert fleet.states() == {name: ("steady", 4 if name in live else 2) for name in fleet.containers}
    assert fleet.host.edgert("rollout", "abort")["rollout"]["state"] == "aborted"
    refused = fleet.host.started("rollout", "resume")
    assert refused.wait(COMMAND_S_MAX) == 2
    assert refused.stderr is not None
    assert "was aborted" in refused.stderr.read()


def test_ctrl_c_ends_a_pause_between_waves_and_the_rollout_can_resume(fleet: Fleet) -> None:
    host = fleet.host.started("deploy", fleet.bundle(5), "all", "--canary", 1, "--pause", "10m")
    read_until(host, "waiting 600 s")
    told = fleet.host.edgert("rollout", "status")
    assert told["rollout"]["state"] == "paused"
    assert set(results(told).values()) == {"live", "not-begun"}
    host.send_signal(signal.SIGINT)
    assert host.wait(COMMAND_S_MAX) == Interrupted.exit_code
    assert fleet.host.edgert("rollout", "status")["rollout"]["state"] == "stopped"
    assert sorted(release for _, release in fleet.states().values())[-2:] == [4, 5], "no second wave was begun"


def test_a_rollout_resumes_after_its_host_was_killed_during_a_wave(fleet: Fleet) -> None:
    """The host is killed while the first devices of a wave are on trial; `resume` completes the rollout."""
    before = fleet.states()
    words = ("--canary", 1, "--wave", "50%,100%", "--trial", f"{TRIAL_S}s", "--verbose")
    host = fleet.host.started("deploy", fleet.bundle(6), "all", *words)
    read_until(host, "wave 2 of 3")
    read_until(host, "check")
    host.kill()
    host.wait()
    told = fleet.host.edgert("rollout", "status")
    assert told["rollout"]["state"] == "cut off"
    left = fleet.states()
    print(f"\nwhen the host died: {left}")
    assert left["unit-0"] == ("steady", 6)
    assert {name: left[name] for name in list(left)[HALF:]} == {name: before[name] for name in list(left)[HALF:]}
    fleet.wait_for_trials()
    assert all(release in (6, before[name][1]) for name, (_, release) in fleet.states().items())
    fleet.host.edgert("rollout", "resume")
    assert set(fleet.states().values()) == {("steady", 6)}


def test_devices_have_complete_versions_after_a_power_cut_of_half_the_fleet(fleet: Fleet) -> None:
    serving = {release for _, release in fleet.states().values()}
    cut = [fleet.containers[f"unit-{n}"] for n in range(0, DEVICES, 2)]
    slow = {"engine": "fault", "program": {"load": {"fault": "slow", "s": 10.0}}}  # no device is done before the cut
    bundle = fleet.bundle(7, padding_bytes=2_000_000, **slow)
    host = fleet.host.started("deploy", bundle, "all", "--trial", f"{TRIAL_S}s", "--verbose")
    read_until(host, "activate")
    with ThreadPoolExecutor(DEVICES) as pool:
        list(pool.map(Container.cycle, cut))
    assert host.wait(300) != 0
    fleet.wait_for_trials()
    assert {release for _, release in fleet.states().values()} <= {*serving, 7}
