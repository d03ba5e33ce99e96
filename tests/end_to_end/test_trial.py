"""A trial with limits on a real device: after a broken limit, the old version serves again."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.checks.trial_status import TrialPhase, TrialState
from edgert.cli.trial import trial_of
from edgert.config import read_config
from edgert.errors import DeployUnderWay, DeviceUnreachable, EdgeRTError
from edgert.versions.boot_clock import BOOT_ID_VARIABLE
from edgert.versions.claims import Claims, claiming
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots, SlotState
from edgert.versions.trial_limits import (
    COMPARED_FEW,
    COMPARED_MIN,
    REQUESTS_MIN,
    TrialLimits,
    parse_limits,
)
from edgert_deploy.common.parallel import UserStop
from edgert_deploy.devices.inventory import Device as Listed
from edgert_deploy.devices.transports import LineSink, Result, open_transport
from edgert_deploy.devices.transports.local import LocalTransport
from edgert_deploy.rollout.deployment import Outcome, deploy_one
from edgert_deploy.rollout.request import DeployRequest, read_offer
from tests.support.clients import PAUSE_S
from tests.support.devices import Device, a_device, events, wait_until

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
TRIAL_S_MAX = 120.0  # a busy machine needs much time for a hundred golden samples
FAILS_AT_7 = {"engine": "fault", "program": {"runs": [{"fault": "raise", "value": 7.0}]}}

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


# --- on a device ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """Release 1 of echo serves; tests put others on trial and leave nothing on trial."""
    with a_device("[serving]\nbatch_max = 1\n") as one:
        one.put()
        one.put(model="other")  # with two models, workers are forks, which start in a tenth of the processor time
        yield one


@contextmanager
def traffic(device: Device, *values: float) -> Iterator[None]:
    """Run an app that repeatedly sends ITEM, multiplied by each of `values` in turn."""
    stop = threading.Event()

    def ask_on() -> None:
        with device.client() as client:
            while not stop.wait(PAUSE_S):
                for value in values:
                    try:
                        client.infer("echo", ITEM * value, cache=False)
                    except EdgeRTError:
                        stop.wait(0.01)

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


_releases = iter(range(2, 1000))


def on_trial(device: Device, limits: TrialLimits, **bundle: Any) -> tuple[SlotStore, int]:
    """Put a new release on trial with `limits`, and let the daemon serve it."""
    release = next(_releases)
    install(device.bundle(release=release, **bundle), device.state, read_config(device.state))
    store = SlotStore(device.state.models / "echo")
    store.activate(60.0, limits)
    assert device.sync("echo")["release"] == release
    return store, release


def reason_of_rollback(device: Device, store: SlotStore, release: int) -> str:
    """Wait until `release` was rolled back and the previous version serves; return the reason."""
    wait_until(lambda: store.read().state is SlotState.STEADY, "the trial ends", TRIAL_S_MAX)
    returned = store.read().rolled_back
    assert returned is not None, "it was kept"
    assert returned.release == release
    wait_until(lambda: device.serving().get("release", release) != release, "the previous version serves")
    return returned.reason


@pytest.mark.parametrize(
    ("limit", "bundle", "values", "says"),
    [
        ("p99_ms=5", {"delay_s": 0.01}, (1.0,), r"p99_ms is [\d.]+ ms, above its limit of 5 ms"),
        ("error_share=10%", FAILS_AT_7, (1.0, 7.0), r"error_share is [45]\d.*above its limit of 10%"),
        ("memory_mb=5", {}, (), r"memory_mb is [\d.]+ MB, above its limit of 5 MB"),
        ("agreement=99%", {"op": "sum"}, (1.0,), r"agreement is 0%, below its limit of 99% .* agree"),
        ("min_requests=1000000", {}, (1.0,), r"min_requests is \d+, below its limit of 1000000"),
    ],
    ids=["p99", "errors", "memory", "agreement", "min-requests"],
)
def test_a_broken_limit_rolls_back_to_the_version_before_and_the_reason_names_the_limit(
    device: Device, limit: str, bundle: dict[str, Any], values: tuple[float, ...], says: str
) -> None:
    limits = {name: value for name, value in parse_limits([limit]).items() if value is not None}
    with traffic(device, *(values or (1.0,))):
        store, release = on_trial(device, TrialLimits(limits, 1.0 if "min" in limit else 30.0), **bundle)
        reason = reason_of_rollback(device, store, release)
    assert re.search(says, reason), reason
    (told,) = [event for event in events(device, "rolled_back") if event["release"] == release]
    assert told["reason"] == reason[:300]
    assert (told["broken"], told["limit"]) == (limit.partition("=")[0], pytest.approx(next(iter(limits.values()))))
    assert device.model()["rolled_back"]["reason"] == reason


def test_without_traffic_golden_samples_replace_requests_except_for_limits_on_agreement_and_requests(
    device: Device,
) -> None:
    store, release = on_trial(device, TrialLimits({"p99_ms": 60_000.0, "error_share": 0.0}, 0.5, unattended=True))
    wait_until(lambda: store.read().state is SlotState.STEADY, "the trial ends", TRIAL_S_MAX)
    assert (store.read().rolled_back, store.read().ratchet) == (None, release)
    (kept,) = [event for event in events(device, "kept") if event["release"] == release]
    assert (kept["golden"], kept["requests"], kept["error_rate"]) == (REQUESTS_MIN, REQUESTS_MIN, 0.0)
    store, release = on_trial(device, TrialLimits({"agreement": 0.9, "p99_ms": 60_000.0}, 0.5))
    assert "0 answers were compared, 20 are needed" in reason_of_rollback(device, store, release)
    store, release = on_trial(device, TrialLimits({"p99_ms": 60_000.0, "min_requests": 1.0}, 0.5))
    assert "min_requests is 0, below its limit of 1 (0 requests, 100 golden" in reason_of_rollback(
        device, store, release
    )


def test_the_host_can_keep_the_version_only_after_all_limits_held(device: Device) -> None:
    limits = ("--limit", "p99_ms=60000", "--limit", "agreement=99%", "--limit", "error_share=0")
    release = next(_releases)
    install(device.bundle(release=release), device.state, read_config(device.state))
    with traffic(device, 1.0, 2.0):
        device.run("activate", "echo", *limits, "--watch", "10m")
        assert "--force" in device.run("mark-good", "echo", code=7)["error"]["message"]
        assert device.run("trial", "echo")["state"] in ("watching", "loading")
        device.run("rollback", "echo")
        install(device.bundle(release=release), device.state, read_config(device.state))
        device.run(
            "activate", "echo", *limits, "--watch", "10s"
        )  # enough time to compare twenty answers, even on a busy machine
        found = device.run("trial", "echo", "--wait")
    assert (found["state"], found["release"], found["readings"]["failed"]) == ("held", release, 0)
    assert found["readings"]["agreed"] == found["readings"]["compared"] >= COMPARED_MIN
    assert bool(found["doubt"]) == (found["readings"]["compared"] < COMPARED_FEW)
    assert [event["release"] for event in events(device, "limits_held")] == [release]
    device.run("mark-good", "echo")
    assert device.run("trial", "echo", "--digest", found["digest"])["state"] == "kept"


def test_a_benchmark_never_counts_in_the_figures_of_a_trial(device: Device) -> None:
    on_trial(device, TrialLimits({"p99_ms": 60_000.0}, 600.0))
    words = ("bench", "--model", "echo", "--for", "0.1s", "--clients", "1")
    assert "edgertd trial echo --wait" in device.run(*words, code=7)["error"]["message"]
    assert device.run("trial", "echo").get("readings", {"requests": 0})["requests"] == 0
    device.run("rollback", "echo")
    token = device.run("claim", "echo", "--by", "ann@desk")["token"]
    assert "ann@desk" in device.run(*words, code=7)["error"]["message"]
    device.run("unclaim", token)
    with claiming(device.state, "echo", "a benchmark"), pytest.raises(DeployUnderWay, match="a benchmark"):
        Claims(device.state, "d-test").acquire("echo", "ann@desk", 60.0)
    assert device.run(*words)["results"][0]["runs"] > 0
    assert device.run("status")["claims"] == []


def test_a_limit_that_this_device_can_never_measure_is_refused_at_once(device: Device) -> None:
    release = next(_releases)
    install(device.bundle(release=release, item_shape=(4,)), device.state, read_config(device.state))
    if device.run("status")["temp_c"] is None:
        assert (
            "no readable thermometer"
            in device.run("activate", "echo", "--limit", "temp_c=80", code=7)["error"]["message"]
        )
    install(device.bundle(release=release, item_shape=(5,)), device.state, read_config(device.state))
    told = device.run("activate", "echo", "--limit", "agreement=99%", code=7)["error"]["message"]
    assert "differ in inputs" in told
    assert device.model()["state"] == "staged"
    device.run("rollback", "echo")


def test_a_version_whose_worker_ends_during_the_watch_is_rolled_back(device: Device) -> None:
    store, release = on_trial(device, TrialLimits({"p99_ms": 60_000.0}, 30.0))
    os.kill(device.serving()["pid"], signal.SIGKILL)
    assert "killed by signal 9" in reason_of_rollback(device, store, release)


def test_a_watch_begins_although_the_slots_were_locked_when_the_version_came_up(device: Device) -> None:
    release = next(_releases)
    install(device.bundle(release=release), device.state, read_config(device.state))
    store = SlotStore(device.state.models / "echo")
    store.activate(60.0, TrialLimits({}, 0.5, unattended=True))
    with store.locked():
        assert device.sync("echo")["release"] == release
        device.serving()  # by now, the daemon has tried to begin the watch
    wait_until(lambda: store.read().state is SlotState.STEADY, "the trial ends", TRIAL_S_MAX)
    assert (store.read().rolled_back, store.read().ratchet) == (None, release)


def test_a_watch_ends_at_once_if_the_golden_samples_cannot_be_read(device: Device) -> None:
    store, release = on_trial(device, TrialLimits({"p99_ms": 60_000.0}, 2.0))
    (store.live_folder(store.read()) / "golden/input-0.npy").write_bytes(b"")  # an SD card may lose whole files
    assert "p99_ms could not be measured" in reason_of_rollback(device, store, release)


def test_a_trial_is_reported_as_watching_until_the_slots_record_its_verdict(device: Device) -> None:
    """Otherwise, a command that waits for the trial would see no trial, and no reason of the rollback."""
    store, release = on_trial(device, TrialLimits({"memory_mb": 5.0}, 60.0))
    wait_until(lambda: (store.read().limits or TrialLimits({})).started, "it is watched")
    with store.locked():  # before the third comparison, which may end the watch
        wait_until(lambda: (device.serving()["trial"] or {}).get("phase") == TrialPhase.BROKEN, "the limit is broken")
        found = device.run("trial", "echo")
    assert (found["state"], found["release"]) == ("watching", release)
    assert (
        "memory_mb is" in device.run("trial", "echo", "--wait", "--digest", found["digest"], code=9)["error"]["message"]
    )


class ReadLate(SlotStore):
    """Slots whose reading waits for the end of the watch."""

    def read(self) -> Slots:
        def ended() -> bool:
            limits = SlotStore.read(self).limits
            return limits is None or limits.passed

        wait_until(ended, "the limits held")
        return super().read()


def test_a_watch_that_ends_while_the_device_is_asked_reports_its_last_figures(device: Device) -> None:
    store, release = on_trial(device, TrialLimits({"p99_ms": 60_000.0}, 1.0))
    told = trial_of(device.state, ReadLate(store.folder), "")
    assert told.watch is not None
    assert (told.state, told.release, told.watch.readings.golden) == (TrialState.HELD, release, REQUESTS_MIN)
    store.mark_good()
    device.sync("echo")


@pytest.mark.parametrize("limits", [("--watch", "1m"), ()], ids=["watched", "ran-out"])
def test_without_a_daemon_the_command_trial_ends_the_trial(limits: tuple[str, ...]) -> None:
    with a_device() as device:
        device.put()
        install(device.bundle(release=2), device.state, read_config(device.state))
        store = SlotStore(device.state.models / "echo")
        if limits:
            device.run("activate", "echo", *limits)
            wait_until(lambda: (store.read().limits or TrialLimits({})).started, "it is watched")
            device.stop()
        else:
            device.stop()
            store.activate(0.001)
        told = device.run("trial", "echo", "--wait", code=9)["error"]["message"]
        assert told.endswith("was cut off" if limits else "was not confirmed in time")
        slots = store.read()
        assert (slots.state, slots.live.release) == (SlotState.STEADY, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("rebooted", [False, True], ids=["daemon-killed", "power-cut"])
def test_a_watch_that_was_cut_off_ends_in_a_rollback(rebooted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_device() as device:
        device.put()
        store, release = on_trial(device, TrialLimits({"p99_ms": 60_000.0}, 30.0, unattended=True))
        wait_until(lambda: (store.read().limits or TrialLimits({})).started, "it is watched")
        # Kill the monitor too, which would start the daemon again. A power cut also ends both.
        pid = device.run("status")["daemon"]["pid"]
        for process in (int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]), pid):
            os.kill(process, signal.SIGKILL)
        wait_until(lambda: device.daemon_pid() is None, "it has ended")
        if rebooted:
            monkeypatch.setenv(BOOT_ID_VARIABLE, "b" * 32)
        device.start()
        reason = reason_of_rollback(device, store, release)
        assert reason == (
            "the device was restarted in the middle of the trial" if rebooted else "the watch of its limits was cut off"
        )


# --- from a host ----------------------------------------------------------------------------


class CutLink(LocalTransport):
    """A link to this machine that fails for `dead_for` commands, from the first `trial` command on."""

    def __init__(self, device: Listed, dead_for: int) -> None:
        super().__init__(device)
        self.dead_for = dead_for

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        if self.dead_for and ("trial" in argv or self.dead_for > 100):
            self.dead_for -= 1
            raise DeviceUnreachable("the link is dead")
        return super().run(argv, timeout_s, input, on_stderr)


def deployed(
    device: Device,
    limits: TrialLimits,
    transport: Callable[[Listed], Any] = open_transport,
    stop: UserStop | None = None,
    **bundle: Any,
) -> Outcome:
    """Return the result of a new release that a host deploys."""
    root = os.fspath(device.state.root)
    path = device.bundle(release=next(_releases), **bundle)
    rollout = DeployRequest(path, read_offer(path), limits.confirm_s, transport, limits=limits, stop=stop or UserStop())
    return deploy_one(rollout, Listed("here", "local", root, "this-machine", root), lambda line: None)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
def test_a_deployment_reports_the_reason_of_a_rollback_or_the_figures_of_the_trial(device: Device) -> None:
    before = device.model()["live"]["release"]
    outcome = deployed(device, TrialLimits({"p99_ms": 5.0}, 1.0), delay_s=0.01)
    assert outcome.error is not None
    assert (outcome.result, outcome.error.code, outcome.serving) == ("failed", "deploy.rolled_back", before)
    assert re.search(r"was rolled back: p99_ms is .* above its limit of 5 ms", outcome.error.message)
    assert outcome.error.message.endswith(f"Release {before} is live again")
    held = deployed(device, TrialLimits({"p99_ms": 60_000.0}, 1.0))
    assert held.error is None
    assert held.result == "live"
    assert held.watched is not None
    assert held.watched.readings is not None
    assert held.watched.readings.golden > 0


@pytest.mark.usefixtures("own_cache")
def test_a_deployment_reports_the_reason_of_a_device_that_rolls_back_between_two_steps(device: Device) -> None:
    before = device.model()["live"]["release"]
    store = SlotStore(device.state.models / "echo")

    class GoesBack(LocalTransport):
        def run(
            self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
        ) -> Result:
            if "mark-good" in argv:
                active = store.read().live
                assert active is not None
                assert store.fail(active.digest, "the worker ended")
            return super().run(argv, timeout_s, input, on_stderr)

    outcome = deployed(device, TrialLimits({}, 0.5), GoesBack)
    assert outcome.error is not None
    assert outcome.error.code == "deploy.rolled_back"
    assert outcome.error.message.endswith(f"was rolled back: the worker ended. Release {before} is live again")


@pytest.mark.usefixtures("own_cache")
def test_a_deployment_continues_over_a_link_that_comes_back_in_time(device: Device) -> None:
    outcome = deployed(device, TrialLimits({}, 2.0), lambda listed: CutLink(listed, 1))
    assert outcome.result == "live"


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("unattended", [False, True])
def test_a_device_whose_link_is_lost_during_the_watch_decides_alone(device: Device, unattended: bool) -> None:
    before = device.model()["live"]["release"]
    outcome = deployed(device, TrialLimits({}, 1.0, unattended, 10.0), lambda listed: CutLink(listed, 100))
    assert outcome.error is not None
    assert outcome.error.code == DeviceUnreachable.code
    assert ("keeps the release if all limits hold" in outcome.error.message) is unattended
    store = SlotStore(device.state.models / "echo")
    wait_until(lambda: store.read().state is SlotState.STEADY, "the trial ends", TRIAL_S_MAX)
    slots = store.read()
    assert (slots.ratchet > before) is unattended
    if slots.rolled_back is not None:
        told = device.run("trial", "echo", "--digest", slots.rolled_back.digest, code=9)["error"]["message"]
        assert "all limits held, but the host did not confirm the version within 10 s" in told


@pytest.mark.usefixtures("own_cache")
def test_ctrl_c_during_a_watch_rolls_the_version_back(device: Device) -> None:
    before, stop = device.model()["live"]["release"], UserStop()

    class Pressed(LocalTransport):
        def run(
            self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
        ) -> Result:
            if "trial" in argv:
                stop.press()
            return super().run(argv, timeout_s, input, on_stderr)

    outcome = deployed(device, TrialLimits({}, 60.0), Pressed, stop)
    assert (outcome.result, outcome.serving) == ("stopped", before)
