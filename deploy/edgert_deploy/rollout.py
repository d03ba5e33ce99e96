"""Apply a plan to a device: send, install, activate on trial, check on the device, mark good; else put back.

Devices are independent: each has its own link and its own outcome, and one that does not answer holds nobody up.
What the host cannot finish, the device does: a version that nobody marked good ends with its trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgert.bundle import open_bundle
from edgert.errors import DeviceUnreachable, EdgeRTError, HostKeyMismatch, NotBootstrapped, RolledBack
from edgert_deploy.facts import DeviceFacts
from edgert_deploy.inventory import Device
from edgert_deploy.plan import Offer, Plan, Step, make_plan
from edgert_deploy.remote import ACTIVATE_S_MAX, CHECK_S_MAX, INSTALL_S_MAX, RemoteDaemon
from edgert_deploy.service import start
from edgert_deploy.transports import Transport

AT_ONCE_MAX = 8
QUICK_S_MAX = 60.0
PROGRESS_BYTES = 4 * 1024**2  # smaller transfers are over before anyone reads a line about them

Say = Callable[[str], None]
Opener = Callable[[Device], Transport]


@dataclass(frozen=True)
class Outcome:
    """What became of a deployment on one device.

    `result` is live, unchanged (it was live already), planned (a dry run), or failed with `error`.
    `serving` is the release that is live there now as far as known.
    """

    device: str
    result: str
    steps: tuple[Step, ...] = ()
    serving: int | None = None
    error: EdgeRTError | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        error = None if self.error is None else {"code": self.error.code, "message": self.error.message}
        return {
            "device": self.device,
            "result": self.result,
            "steps": [step.value for step in self.steps],
            "serving": self.serving,
            "error": error,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Rollout:
    """One bundle on its way to devices."""

    bundle: Path
    offer: Offer
    trial_s: float
    open_transport: Opener
    prepare: Callable[[Device, Transport, Say], None] | None = None  # what to do with a device never bootstrapped
    dry_run: bool = False


def read_offer(path: Path) -> Offer:
    """Verify every byte of the bundle against its manifest, before one leaves this host. Raises BundleError.

    Who signed it is the devices' question: each has its own keys.
    """
    with open_bundle(path, trusted=None) as bundle:
        bundle.verify_files()
        return Offer(bundle.manifest, bundle.digest, bundle.envelope.key_ids, path.stat().st_size)


def deploy(rollout: Rollout, devices: Sequence[Device], say: Callable[[str, str], None]) -> list[Outcome]:
    """Deploy to each device, AT_ONCE_MAX at a time; the outcomes in the order of `devices`.

    `say(device name, line)` is called from several threads.
    """
    with ThreadPoolExecutor(max_workers=AT_ONCE_MAX) as pool:
        return list(pool.map(lambda device: deploy_one(rollout, device, lambda line: say(device.name, line)), devices))


def deploy_one(rollout: Rollout, device: Device, say: Say) -> Outcome:
    """Deploy to one device. Never raises EdgeRTError: it is part of the outcome."""
    begun = time.monotonic()
    try:
        transport = rollout.open_transport(device)
        try:
            outcome = _deploy(rollout, device, transport, say)
        finally:
            transport.close()
    except EdgeRTError as error:
        say(error.message)
        serving = error.serving if isinstance(error, RolledBackTo) else None
        outcome = Outcome(device.name, "failed", serving=serving, error=error)
    return replace(outcome, seconds=time.monotonic() - begun)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 where every device took it, else that of the first device that did not."""
    return next((o.error.exit_code for o in outcomes if o.error is not None), 0)


def _deploy(rollout: Rollout, device: Device, transport: Transport, say: Say) -> Outcome:
    daemon = RemoteDaemon(transport, device, say)
    plan = make_plan(_facts(rollout, device, transport, daemon, say), rollout.offer)
    if rollout.dry_run:
        return Outcome(device.name, "planned", plan.steps)
    _apply(rollout, plan, device, transport, daemon, say)
    changed = set(plan.steps) - {Step.START}
    say(f"release {plan.release} of {plan.model} is live" + ("" if changed else " already"))
    return Outcome(device.name, "live" if changed else "unchanged", plan.steps, plan.release)


def _facts(rollout: Rollout, device: Device, transport: Transport, daemon: RemoteDaemon, say: Say) -> DeviceFacts:
    try:
        return daemon.facts()
    except NotBootstrapped:
        if rollout.prepare is None or rollout.dry_run:
            raise
        rollout.prepare(device, transport, say)
        return daemon.facts()


def _apply(rollout: Rollout, plan: Plan, device: Device, transport: Transport, daemon: RemoteDaemon, say: Say) -> None:
    remote = f"{device.state}/incoming/{plan.model}-{plan.release}-{plan.digest[:12]}.edgert"
    on_trial = False
    act: dict[Step, Callable[[], object]] = {
        Step.START: lambda: start(transport, device),
        Step.SEND: lambda: transport.put(rollout.bundle, remote, _progress(say)),
        Step.INSTALL: lambda: _install(daemon, transport, remote),
        Step.ACTIVATE: lambda: daemon.call(
            "activate", plan.model, "--trial-s", f"{rollout.trial_s:g}", timeout_s=ACTIVATE_S_MAX
        ),
        Step.CHECK: lambda: daemon.call("check", plan.model, timeout_s=CHECK_S_MAX),
        Step.MARK_GOOD: lambda: daemon.call("mark-good", plan.model),
    }
    for step in plan.steps:
        say(step.value)
        on_trial = on_trial or step in (Step.ACTIVATE, Step.CHECK)
        try:
            act[step]()
        except (DeviceUnreachable, HostKeyMismatch) as error:
            if on_trial:
                note = f"release {plan.release} was on trial: it ends by itself after {rollout.trial_s:g} s"
                raise type(error)(f"{error.message}; {note}, then what was live before returns") from error
            raise
        except EdgeRTError as error:
            if not on_trial:
                raise
            raise _put_back(plan, daemon, step, error) from error


def _install(daemon: RemoteDaemon, transport: Transport, remote: str) -> None:
    try:
        daemon.call("install", remote, timeout_s=INSTALL_S_MAX)
    finally:
        transport.run(["rm", "-f", remote], QUICK_S_MAX)


def _put_back(plan: Plan, daemon: RemoteDaemon, step: Step, cause: EdgeRTError) -> RolledBack:
    """Leave nothing of the failed version: neither live, nor on trial, nor staged. The error that tells it."""
    failed = f"release {plan.release} of {plan.model} failed at {step.value} [{cause.code}]: {cause.message}"
    try:
        model = daemon.facts().models[plan.model]
        if model.state in ("trial", "first-trial", "staged", "first-staged"):
            daemon.call("rollback", plan.model, timeout_s=ACTIVATE_S_MAX)
            model = daemon.facts().models[plan.model]
    except EdgeRTError as error:
        raise type(cause)(f"{failed}; and going back failed as well [{error.code}]: {error.message}") from error
    now = None if model.active is None else model.active.release
    return RolledBackTo(f"{failed}. " + ("Nothing is live now" if now is None else f"Release {now} is live again"), now)


class RolledBackTo(RolledBack):
    """RolledBack that knows which release is live now; None where there was none before."""

    def __init__(self, message: str, serving: int | None) -> None:
        super().__init__(message)
        self.serving = serving


def _progress(say: Say) -> Callable[[int, int], None]:
    """Tell each tenth of a transfer that takes long enough to be told."""
    told = 0

    def progress(done: int, total: int) -> None:
        nonlocal told
        tenth = 10 * done // total if total else 10
        if total >= PROGRESS_BYTES and tenth > told:
            told = tenth
            say(f"sent {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    return progress
