"""Apply a plan to a device: send, install, activate on trial, check on the device, mark good; else put back.

Devices are independent: each has its own link and its own outcome, and one that does not answer holds nobody up.
What the host cannot finish, the device does: a version that nobody marked good ends with its trial.

One deployment of a model works on a device at a time: it claims the model there before it changes anything.
Who is asked to stop (`Stop`) ends the step under way and takes back what was not marked good yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.expiry import check_expiry
from edgert.checks.status import DeviceStatus
from edgert.errors import (
    DeviceUnreachable,
    EdgeRTError,
    HostKeyMismatch,
    Interrupted,
    NotBootstrapped,
    RolledBack,
    StorageFailed,
)
from edgert.versions.slots import BY_COMMAND, RolledBackVersion
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.common.parallel import AT_ONCE_MAX, Stop, for_each
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote import ACTIVATE_S_MAX, CHECK_S_MAX, RemoteDaemon
from edgert_deploy.devices.service import start
from edgert_deploy.devices.transports import Transport
from edgert_deploy.rollout.claims import claimed
from edgert_deploy.rollout.delta import Deltas
from edgert_deploy.rollout.plan import Offer, Plan, Step, make_plan
from edgert_deploy.rollout.transfer import Delivery
from edgert_deploy.rollout.trial import wait_for_trial

TO_TAKE_BACK = ("trial", "first-trial", "staged", "first-staged")

Say = Callable[[str], None]
Opener = Callable[[Device], Transport]


@dataclass(frozen=True)
class Outcome:
    """What became of a deployment on one device.

    `result` is live, unchanged (it was live already), planned (a dry run), held (not begun), failed with `error`,
    or, where the user ended it, stopped (all is as before) or abandoned (nobody knows yet; the device goes back by
    itself).
    `serving` is the release that is live there now as far as known. `sent_bytes` is the size
    of what was sent (in a dry run: of what would be), `send_s` how long it took, what had to be made for it included;
    `watched` is what the device measured on trial, where limits were watched.
    """

    device: str
    result: str
    steps: tuple[Step, ...] = ()
    serving: int | None = None
    error: EdgeRTError | None = None
    seconds: float = 0.0
    sent_bytes: int = 0
    send_s: float = 0.0
    watched: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        error = None if self.error is None else {"code": self.error.code, "message": self.error.message}
        return {
            "device": self.device,
            "result": self.result,
            "steps": [step.value for step in self.steps],
            "serving": self.serving,
            "error": error,
            "seconds": round(self.seconds, 3),
            "sent_bytes": self.sent_bytes,
            "send_seconds": round(self.send_s, 3),
            "watched": self.watched,
        }


@dataclass(frozen=True)
class DeployRequest:
    """One bundle on its way to devices."""

    bundle: Path
    offer: Offer
    trial_s: float
    open_transport: Opener
    prepare: Callable[[Device, Transport, Say], None] | None = None  # what to do with a device never bootstrapped
    dry_run: bool = False
    stop: Stop = field(default_factory=Stop)
    deltas: Deltas = field(default_factory=Deltas)
    bytes_per_s: float = 0.0  # how fast it may be sent to one device; 0: as fast as it goes
    limits: TrialLimits | None = None  # the limits that the devices watch on trial


def read_offer(path: Path) -> Offer:
    """Verify every byte of the bundle against its manifest, before one leaves this host. Raises BundleError, also for
    one that expired by this host's clock.

    Who signed it is the devices' question: each has its own keys.
    """
    with open_bundle(path, trusted=None) as bundle:
        bundle.verify_files()
        manifest = bundle.manifest
        check_expiry(manifest.expires, f"release {manifest.release} of {manifest.model}", time.time())
        return Offer(bundle.manifest, bundle.digest, bundle.envelope.key_ids, path.stat().st_size)


def deploy(
    deployment: DeployRequest,
    devices: Sequence[Device],
    say: Callable[[str, str], None],
    *,
    at_once: int = AT_ONCE_MAX,
    may_begin: Callable[[], bool] = lambda: True,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Deploy to each device, `at_once` at a time; the outcomes in the order of `devices`.

    `say(device name, line)` is called from several threads; so are `may_begin` before each device is touched (where
    it says no, the device is held) and `on_outcome` with each outcome as it comes.
    """

    def work(device: Device) -> Outcome:
        if not may_begin():
            return Outcome(device.name, "held")
        outcome = deploy_one(deployment, device, lambda line: say(device.name, line))
        on_outcome(outcome)
        return outcome

    given = for_each(devices, work, deployment.stop, at_once)
    outcomes = []
    for device, outcome in zip(devices, given, strict=True):
        if outcome is None:
            outcome = _abandoned(deployment, device)
            on_outcome(outcome)
        outcomes.append(outcome)
    return outcomes


def deploy_one(deployment: DeployRequest, device: Device, say: Say) -> Outcome:
    """Deploy to one device. Never raises EdgeRTError: it is part of the outcome."""
    begun = time.monotonic()
    try:
        transport = deployment.open_transport(device)
        try:
            outcome = _deploy(deployment, device, transport, say)
        finally:
            transport.close()
    except EdgeRTError as error:
        serving = error.serving if isinstance(error, RolledBackTo | StoppedAt) else None
        result = "stopped" if isinstance(error, Interrupted) else "failed"
        say(f"{result} [{error.code}]")
        outcome = Outcome(device.name, result, serving=serving, error=error)
    return replace(outcome, seconds=time.monotonic() - begun)


def exit_code(errors: Sequence[EdgeRTError | None]) -> int:
    """0 where no device has an error, that of Ctrl-C where it kept one from it, else that of the first."""
    if any(isinstance(error, Interrupted) for error in errors):
        return Interrupted.exit_code
    return next((error.exit_code for error in errors if error is not None), 0)


def _deploy(deployment: DeployRequest, device: Device, transport: Transport, say: Say) -> Outcome:
    daemon = RemoteDaemon(transport, device, say)
    _go_on(deployment.stop, None)
    facts = _facts(deployment, device, transport, daemon, say)
    plan = make_plan(facts, deployment.offer, deployment.limits)
    delivery = Delivery(
        deployment.bundle,
        deployment.offer,
        device,
        transport,
        daemon,
        deployment.deltas,
        say,
        deployment.stop,
        deployment.bytes_per_s,
    )
    if deployment.dry_run:
        return Outcome(device.name, "planned", plan.steps, sent_bytes=_to_send(plan, delivery, facts))
    watched: dict[str, Any] | None = None
    if set(plan.steps) <= {Step.START}:
        _apply(deployment, plan, facts, delivery, "", say)
    else:
        limit = {"bytes_per_s": deployment.bytes_per_s} if deployment.bytes_per_s else {}
        with claimed(daemon, plan.model, deployment.offer.size_bytes, **limit) as claim:
            plan = make_plan(claim.facts, deployment.offer, deployment.limits)  # another one may have ended in between
            watched = _apply(deployment, plan, claim.facts, delivery, claim.token, say)
    changed = set(plan.steps) - {Step.START}
    say(f"release {plan.release} of {plan.model} is live" + ("" if changed else " already"))
    result = "live" if changed else "unchanged"
    return Outcome(
        device.name,
        result,
        plan.steps,
        plan.release,
        sent_bytes=delivery.sent_bytes,
        send_s=delivery.send_s,
        watched=watched,
    )


def _to_send(plan: Plan, delivery: Delivery, facts: DeviceStatus) -> int:
    """How many bytes the plan sends."""
    say = delivery.say
    delivery = replace(delivery, say=lambda line: say(f"planned: {line}"))
    return delivery.chosen(facts).stat().st_size if Step.SEND in plan.steps else 0


def _facts(
    deployment: DeployRequest, device: Device, transport: Transport, daemon: RemoteDaemon, say: Say
) -> DeviceStatus:
    try:
        return daemon.status()
    except NotBootstrapped:
        if deployment.prepare is None or deployment.dry_run:
            raise
        deployment.prepare(device, transport, say)
        return daemon.status()


def _apply(
    deployment: DeployRequest, plan: Plan, facts: DeviceStatus, delivery: Delivery, token: str, say: Say
) -> dict[str, Any] | None:
    """Do the steps, or undo them; what the device measured where it watched limits."""
    daemon, transport, device = delivery.daemon, delivery.transport, delivery.device
    under = ("--claim", token)
    on_trial = False
    watched: dict[str, Any] | None = None

    def watch() -> None:
        nonlocal watched
        assert plan.limits is not None  # what else would be watched
        watched = wait_for_trial(daemon, plan, plan.limits, under, deployment.stop, say)

    act: dict[Step, Callable[[], object]] = {
        Step.START: lambda: start(transport, device),
        Step.SEND: lambda: delivery.send(facts),
        Step.INSTALL: lambda: delivery.install(under),
        Step.ACTIVATE: lambda: daemon.call(
            "activate",
            plan.model,
            "--trial-s",
            f"{deployment.trial_s:g}",
            *(plan.limits.words() if plan.limits else ()),
            *under,
            timeout_s=ACTIVATE_S_MAX,
        ),
        Step.CHECK: lambda: daemon.call("check", plan.model, *under, timeout_s=CHECK_S_MAX),
        Step.WATCH: watch,
        Step.MARK_GOOD: lambda: daemon.call("mark-good", plan.model, *under),
    }
    for step in plan.steps:
        try:
            _go_on(deployment.stop, step)
            say(step.value)
            on_trial = on_trial or step in (Step.ACTIVATE, Step.CHECK)
            act[step]()
        except Interrupted as error:
            if step is Step.INSTALL:  # sent, and nobody takes it away
                delivery.take_back()
            raise _stopped(plan, daemon, step, error, under) from error
        except (DeviceUnreachable, HostKeyMismatch) as error:
            if on_trial:
                raise type(error)(
                    f"{error.message}; release {plan.release} was on trial: {_alone(deployment)}"
                ) from error
            raise
        except EdgeRTError as error:
            if not on_trial:
                raise
            raise _put_back(plan, daemon, step, error, under, _rolled_back(facts, plan)) from error
    return watched


def _alone(deployment: DeployRequest) -> str:
    """What a device does that the host has lost in the middle of a trial."""
    if deployment.limits is not None and deployment.limits.unattended:
        return "the device keeps it if all limits hold, else what was live before returns"
    lasts_s = deployment.trial_s + (deployment.limits.trial_s if deployment.limits else 0.0)
    return f"it ends by itself after {lasts_s:g} s, then what was live before returns"


def _go_on(stop: Stop, step: Step | None) -> None:
    """Raises Interrupted where the user wants no further step."""
    if stop.asked:
        raise Interrupted(
            "interrupted before anything was done" if step is None else f"interrupted before {step.value}"
        )


def _abandoned(deployment: DeployRequest, device: Device) -> Outcome:
    manifest = deployment.offer.manifest
    return Outcome(
        device.name,
        "abandoned",
        error=Interrupted(
            f"abandoned in the middle: if release {manifest.release} of {manifest.model} went on trial there, the device "
            f"decides alone: {_alone(deployment)}; look with: edgert status {device.name}"
        ),
    )


def _put_back(
    plan: Plan,
    daemon: RemoteDaemon,
    step: Step,
    cause: EdgeRTError,
    under: tuple[str, str],
    before: RolledBackVersion | None,
) -> RolledBack:
    """Leave nothing of the failed version: neither live, nor on trial, nor staged. The error that tells it.

    `before` is what the device said of an earlier attempt at the same version.
    """
    failed = f"release {plan.release} of {plan.model} failed at {step.value} [{cause.code}]: {cause.message}"
    if isinstance(cause, RolledBack):  # the device did it by itself, and said why
        failed = cause.message
    try:
        then = _take_back(plan, daemon, under)
    except EdgeRTError as error:
        raise type(cause)(f"{failed}; and going back failed as well [{error.code}]: {error.message}") from error
    noted, now = _rolled_back(then, plan), _release(then, plan)
    if noted is not None and noted != before and noted.reason != BY_COMMAND and noted.reason not in failed:
        # The device ended the trial while the host was on its way to the next step, which only found nothing on trial.
        failed = f"{daemon.device.name}: release {plan.release} of {plan.model} was rolled back: {noted.reason}"
    return RolledBackTo(f"{failed}. {_live(now, 'again')}", now)


def _stopped(plan: Plan, daemon: RemoteDaemon, step: Step, cause: Interrupted, under: tuple[str, str]) -> Interrupted:
    """The same for a deployment that the user ended."""
    if step in (Step.START, Step.SEND, Step.INSTALL):
        return StoppedAt(f"{cause.message}: what was live stays", None)
    try:
        now = _release(_take_back(plan, daemon, under), plan)
    except EdgeRTError as error:
        raise Interrupted(
            f"{cause.message}, and going back failed [{error.code}]: {error.message}; a trial ends by itself"
        ) from error
    return StoppedAt(f"{cause.message}: release {plan.release} was taken back. {_live(now)}", now)


def _take_back(plan: Plan, daemon: RemoteDaemon, under: tuple[str, str]) -> DeviceStatus:
    """Roll back what is on trial or staged; how the device stands then. The model may have gone from there meanwhile.

    Raises StorageFailed where its slots cannot be read.
    """
    facts = daemon.status()
    model = facts.model(plan.model)
    if model is not None and model.damaged:
        raise StorageFailed(model.damaged)
    if model is not None and model.state in TO_TAKE_BACK:
        daemon.call("rollback", plan.model, *under, timeout_s=ACTIVATE_S_MAX)
        facts = daemon.status()
    return facts


def _release(facts: DeviceStatus, plan: Plan) -> int | None:
    """The release of the plan's model that is live."""
    model = facts.model(plan.model)
    return None if model is None or model.live is None else model.live.release


def _rolled_back(facts: DeviceStatus, plan: Plan) -> RolledBackVersion | None:
    """Return the device's note that it rolled the plan's version back, where it did."""
    model = facts.model(plan.model)
    noted = None if model is None else model.rolled_back
    return noted if noted is not None and noted.digest == plan.digest else None


def _live(release: int | None, again: str = "") -> str:
    return "Nothing is live now" if release is None else f"Release {release} is live {again}".rstrip()


class RolledBackTo(RolledBack):
    """RolledBack that knows which release is live now; None where there was none before."""

    def __init__(self, message: str, serving: int | None) -> None:
        super().__init__(message)
        self.serving = serving


class StoppedAt(Interrupted):
    """Interrupted that knows which release is live now; None where nobody asked, or where there is none."""

    def __init__(self, message: str, serving: int | None) -> None:
        super().__init__(message)
        self.serving = serving
