"""A deployment whose step fails rolls back, gives the reason, leaves no files, and reports no success.

The device is simulated at the transport seam, with the transition table of real slots. Its commands fail on request.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import SigningKey, new_key
from edgert.errors import (
    BundleCorrupt,
    DeviceError,
    DeviceUnreachable,
    EdgeRTError,
    HealthCheckFailed,
    ReleaseTooOld,
    StorageFailed,
    exit_code_of,
)
from edgert.versions.slots import BY_COMMAND, Slots, SlotState, Version
from edgert_deploy.common.parallel import UserStop
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import PLAIN, PutOptions, Transport
from edgert_deploy.rollout.deployment import Outcome, deploy_one
from edgert_deploy.rollout.plan import Step
from edgert_deploy.rollout.request import DeployRequest, read_offer
from edgert_deploy.rollout.rollout import deploy_each
from tests.support.bundles import make_null_bundle
from tests.support.devices import wait_until
from tests.support.stand_ins.simulated_device import BOARD, RELEASE_1, SimulatedDevice


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return new_key()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, key: SigningKey) -> Path:
    """Return the bundle of release 2 of `echo`."""
    return make_null_bundle(tmp_path_factory.mktemp("bundle"), key, release=2)


def roll_out(bundle: Path, device: SimulatedDevice, **changes: Any) -> Outcome:
    request = DeployRequest(bundle, read_offer(bundle), 60.0, lambda _: device, **changes)
    outcome = deploy_one(request, BOARD, lambda _: None)
    assert device.closed == 1
    assert device.files == set(), "what was sent must not stay"
    return outcome


def test_a_deployment_runs_all_steps_in_order(bundle: Path, key: SigningKey) -> None:
    device = SimulatedDevice(key, RELEASE_1)
    outcome = roll_out(bundle, device)
    assert (outcome.result, outcome.serving, outcome.error) == ("live", 2, None)
    assert device.done == ["install", "activate", "check", "mark-good"]
    assert (device.slots.state, device.slots.ratchet) == (SlotState.STEADY, 2)


def test_a_bundle_that_a_build_replaces_before_its_transfer_is_not_installed(key: SigningKey, tmp_path: Path) -> None:
    class DuringABuild(SimulatedDevice):
        def put(self, local: Path, remote: str, how: PutOptions = PLAIN) -> None:
            make_null_bundle(tmp_path / "other", key, release=2, op="zeros").replace(local)
            super().put(local, remote, how)

    device = DuringABuild(key, RELEASE_1)
    error = roll_out(make_null_bundle(tmp_path, key, release=2), device).error
    assert error is not None
    assert "changed since this command read it, so it was not installed" in error.message
    assert (device.done, device.slots) == ([], RELEASE_1)


def test_a_dry_run_changes_nothing(bundle: Path, key: SigningKey) -> None:
    device = SimulatedDevice(key, RELEASE_1)
    assert roll_out(bundle, device, dry_run=True).result == "planned"
    assert (device.done, device.slots) == ([], RELEASE_1)


@pytest.mark.parametrize("verb", ["activate", "check", "mark-good"])
def test_a_release_that_fails_on_trial_is_rolled_back(bundle: Path, key: SigningKey, verb: str) -> None:
    device = SimulatedDevice(key, RELEASE_1, **{verb.replace("-", "_"): HealthCheckFailed("output y is off by 3")})
    outcome = roll_out(bundle, device)
    assert outcome.error is not None
    assert (outcome.error.code, outcome.error.exit_code, outcome.serving) == ("deploy.rolled_back", 9, 1)
    assert f"at {verb} [device.health_check_failed]" in outcome.error.message
    assert "off by 3" in outcome.error.message
    assert "Release 1 is live again" in outcome.error.message
    assert (device.done[-1], device.slots.state, device.slots.live_slot) == ("rollback", SlotState.STEADY, "a")
    assert "off by 3" in device.reason, "a failure, not a command, is the reason that the device reports"


def test_an_error_names_a_renamed_device_as_the_inventory_does(bundle: Path, key: SigningKey) -> None:
    device = SimulatedDevice(key, Slots(SlotState.STEADY, "a", a=Version(5, "five", good=True), ratchet=5))
    device.name = "its-old-name"
    error = roll_out(bundle, device).error
    assert error is not None
    assert "which was live on board" in error.message


def test_a_first_release_that_fails_leaves_no_live_version(bundle: Path, key: SigningKey) -> None:
    device = SimulatedDevice(key, check=HealthCheckFailed("off"))
    outcome = roll_out(bundle, device)
    assert outcome.error is not None
    assert "Nothing is live now" in outcome.error.message
    assert (outcome.serving, device.slots.state) == (None, SlotState.EMPTY)


def test_the_error_distinguishes_a_model_that_was_removed_from_a_damaged_model(bundle: Path, key: SigningKey) -> None:
    """Two cases: the folder of the model was removed, or its slots cannot be read."""
    device = SimulatedDevice(key, check=HealthCheckFailed("off"))
    device.before = lambda verb: device.hidden.add("echo") if verb == "check" else None
    error = roll_out(bundle, device).error
    assert error is not None
    assert (error.code, "Nothing is live now" in error.message) == ("deploy.rolled_back", True)
    device = SimulatedDevice(key, check=HealthCheckFailed("off"))
    device.before = lambda verb: vars(device).update(damaged="its file is torn") if verb == "check" else None
    error = roll_out(bundle, device).error
    assert error is not None
    assert "the rollback failed, too [device.storage_failed]: its file is torn" in error.message


def test_the_error_does_not_claim_a_rollback_that_also_failed(bundle: Path, key: SigningKey) -> None:
    device = SimulatedDevice(key, RELEASE_1, check=HealthCheckFailed("off"), rollback=DeviceError("disk is gone"))
    error = roll_out(bundle, device).error
    assert error is not None
    assert error.code == "device.health_check_failed"
    assert "the rollback failed, too [device.error]" in error.message


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (ReleaseTooOld("older than 7"), "refused"),
        (BundleCorrupt("a hash differs"), "failed"),
        (StorageFailed("disk full"), "failed"),
    ],
)
def test_a_bundle_that_the_device_must_not_accept_has_the_result_refused(
    bundle: Path, key: SigningKey, error: EdgeRTError, result: str
) -> None:
    assert roll_out(bundle, SimulatedDevice(key, RELEASE_1, install=error)).result == result


@pytest.mark.parametrize(
    ("verb", "error"),
    [
        ("install", ReleaseTooOld("older than 7")),
        ("install", StorageFailed("disk full")),
        ("put", StorageFailed("disk full")),
        ("put", DeviceUnreachable("the link died")),
    ],
)
def test_a_failure_before_the_switch_needs_no_rollback(
    bundle: Path, key: SigningKey, verb: str, error: EdgeRTError
) -> None:
    device = SimulatedDevice(key, RELEASE_1, **{verb: error})
    outcome = roll_out(bundle, device)
    assert outcome.error is not None
    assert outcome.error.code == error.code
    assert "rollback" not in device.done
    assert device.slots == RELEASE_1


def test_the_error_of_a_link_that_dies_during_the_trial_says_that_the_trial_ends_by_itself(
    bundle: Path, key: SigningKey
) -> None:
    device = SimulatedDevice(key, RELEASE_1, check=DeviceUnreachable("the link died"))
    error = roll_out(bundle, device).error
    assert error is not None
    assert error.code == "device.unreachable"
    assert "ends by itself after 60 s" in error.message
    assert device.slots.state is SlotState.TRIAL


def test_an_error_of_this_host_during_the_trial_gives_the_next_step(bundle: Path, key: SigningKey) -> None:
    device = SimulatedDevice(key, RELEASE_1)

    def before(verb: str) -> None:
        if verb == "check":
            raise OSError(errno.EMFILE, "Too many open files")

    device.before = before
    error = roll_out(bundle, device).error
    assert error is not None
    assert "board: Too many open files (on this host); repair this, then deploy again" in error.message
    assert "ends by itself after 60 s" in error.message
    assert "edgert status board" in error.message


def test_a_deployment_continues_where_an_earlier_deployment_was_cut_off(bundle: Path, key: SigningKey) -> None:
    device = SimulatedDevice(key, RELEASE_1, check=DeviceUnreachable("the link died"))
    roll_out(bundle, device)
    device.faults, device.done, device.closed = {}, [], 0
    assert roll_out(bundle, device).result == "live"
    assert device.done == ["check", "mark-good"]


def test_deployments_to_several_devices_are_independent_and_keep_their_order(bundle: Path, key: SigningKey) -> None:
    simulated = {
        "a": SimulatedDevice(key, RELEASE_1),
        "b": SimulatedDevice(key, status=DeviceUnreachable("gone")),
        "c": SimulatedDevice(new_key()),
        "d": SimulatedDevice(key),
    }
    opener: Callable[[Device], Transport] = lambda device: simulated[device.name]  # noqa: E731
    request = DeployRequest(bundle, read_offer(bundle), 60.0, opener)
    devices = [Device(**{**vars(BOARD), "name": name, "address": name}) for name in simulated]
    outcomes = deploy_each(request, devices, lambda name, line: None)
    codes = [(o.device, o.result, o.error and o.error.code) for o in outcomes]
    assert codes == [
        ("a", "live", None),
        ("b", "failed", "device.unreachable"),
        ("c", "refused", "bundle.signature_invalid"),
        ("d", "live", None),
    ]
    assert exit_code_of([o.error for o in outcomes]) == 6
    assert exit_code_of([outcomes[0].error]) == 0
    assert Step.SEND in outcomes[0].steps


# --- one deployment at a time ---------------------------------------------------------------


def test_a_model_that_another_deployment_works_on_is_not_changed(bundle: Path, key: SigningKey) -> None:
    device = SimulatedDevice(key, RELEASE_1)
    device.claims["echo"] = "echo.another"
    outcome = roll_out(bundle, device)
    assert outcome.error is not None
    assert (outcome.result, outcome.error.code) == ("failed", "device.deploy_under_way")
    assert (device.done, device.slots, device.claims) == ([], RELEASE_1, {"echo": "echo.another"})


def test_a_second_deployment_from_the_same_host_is_refused_while_the_first_runs(bundle: Path, key: SigningKey) -> None:
    device, second = SimulatedDevice(key, RELEASE_1), SimulatedDevice(key, RELEASE_1)
    outcomes: list[Outcome] = []
    device.before = lambda verb: outcomes.append(roll_out(bundle, second)) if verb == "check" else None
    assert roll_out(bundle, device).result == "live"
    assert outcomes[0].error is not None
    assert outcomes[0].error.code == "device.deploy_under_way"
    assert second.done == []


def test_a_deployment_whose_claim_was_made_but_not_answered_does_not_block_its_own_host(
    bundle: Path, key: SigningKey
) -> None:
    device = SimulatedDevice(key, RELEASE_1, claim=DeviceUnreachable("no link"))
    assert roll_out(bundle, device).result == "failed"
    assert device.claims
    device.closed = 0
    assert roll_out(bundle, device).result == "live"
    assert device.claims == {}


def test_every_deployment_releases_its_claim(bundle: Path, key: SigningKey) -> None:
    for faults in ({}, {"check": HealthCheckFailed("off")}, {"install": StorageFailed("full")}):
        device = SimulatedDevice(key, RELEASE_1, **faults)
        roll_out(bundle, device)
        assert device.claims == {}


def test_a_deployment_from_a_host_with_a_full_disk_releases_its_claim(
    bundle: Path, key: SigningKey, tmp_path: Path
) -> None:
    device = SimulatedDevice(key, RELEASE_1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        error = roll_out(bundle, device).error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error is not None
    assert (error.code, str(tmp_path / "cache") in error.message, device.claims) == ("device.storage_failed", True, {})


# --- Ctrl-C ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "done"),
    [
        ("status", []),
        ("claim", []),
        ("install", ["install", "rollback"]),
        ("activate", ["install", "activate", "rollback"]),
        ("check", ["install", "activate", "check", "rollback"]),
    ],
)
def test_ctrl_c_ends_the_step_and_rolls_back_a_version_that_was_not_kept(
    bundle: Path, key: SigningKey, verb: str, done: list[str]
) -> None:
    device, stop = SimulatedDevice(key, RELEASE_1), UserStop()
    device.before = lambda word: stop.press() if word == verb and not stop.asked else None
    outcome = roll_out(bundle, device, stop=stop)
    assert outcome.error is not None
    assert (outcome.result, outcome.error.code, exit_code_of([outcome.error])) == ("stopped", "deploy.interrupted", 130)
    assert device.done == done
    assert (device.slots.state, device.slots.live_slot, device.slots.ratchet) == (SlotState.STEADY, "a", 1)
    assert device.claims == {}
    assert device.reason == (BY_COMMAND if done else "")
    assert ("Release 1 is live" in outcome.error.message) == bool(done)


def test_ctrl_c_in_the_last_step_comes_too_late_and_the_result_is_live(bundle: Path, key: SigningKey) -> None:
    device, stop = SimulatedDevice(key, RELEASE_1), UserStop()
    device.before = lambda verb: stop.press() if verb == "mark-good" else None
    outcome = roll_out(bundle, device, stop=stop)
    assert (outcome.result, outcome.serving, exit_code_of([outcome.error])) == ("live", 2, 0)


def test_after_ctrl_c_the_error_does_not_claim_a_rollback_that_failed(bundle: Path, key: SigningKey) -> None:
    device, stop = SimulatedDevice(key, RELEASE_1, rollback=DeviceError("disk is gone")), UserStop()
    device.before = lambda verb: stop.press() if verb == "activate" else None
    error = roll_out(bundle, device, stop=stop).error
    assert error is not None
    assert "the rollback failed [device.error]" in error.message
    assert "ends by itself" in error.message


def test_a_second_ctrl_c_detaches_at_once_and_the_error_says_what_happens_to_the_device(
    bundle: Path, key: SigningKey
) -> None:
    hanging, quick, stop = SimulatedDevice(key, RELEASE_1), SimulatedDevice(key, RELEASE_1), UserStop()
    hangs, never = threading.Event(), threading.Event()

    def hang(verb: str) -> None:
        if verb == "check":
            hangs.set()
            never.wait(60)

    hanging.before = hang
    devices = [Device(**{**vars(BOARD), "name": name, "address": name}) for name in ("hanging", "quick")]
    opener: Callable[[Device], Transport] = lambda device: hanging if device.name == "hanging" else quick  # noqa: E731
    request = DeployRequest(bundle, read_offer(bundle), 60.0, opener, stop=stop)

    threads = threading.active_count()

    def press_twice() -> None:
        hangs.wait(60)
        # The thread of the quick device ends after its outcome. The main thread and the hanging thread remain.
        wait_until(lambda: quick.closed == 1 and threading.active_count() == threads + 2, "the quick one is done")
        stop.press()
        stop.press()

    presser = threading.Thread(target=press_twice)
    presser.start()
    outcomes = deploy_each(request, devices, lambda name, line: None)
    presser.join()
    assert [outcome.result for outcome in outcomes] == ["abandoned", "live"]
    assert outcomes[0].error is not None
    assert "ends by itself after 60 s" in outcomes[0].error.message
    assert exit_code_of([o.error for o in outcomes]) == 130
    never.set()
