"""A deployment: the transfer and the activation of one bundle on one device.

The device's facts determine a plan, the plan lists steps, and the steps lead to an outcome.

A deployment claims its model on the device before it changes anything, so that no other deployment interferes. If the
host disappears, the device decides alone: it rolls a version back if no command marks the version good before the end
of its trial. If the user stops the deployment, a transfer or a watch ends at once; any other step first runs to its
end. Then the deployment rolls back a version that is on trial.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum

from edgert.checks.status import DeviceStatus
from edgert.durations import duration_text
from edgert.errors import (
    BundleCorrupt,
    BundleError,
    DeviceUnreachable,
    EdgeRTError,
    ErrorText,
    HostKeyMismatch,
    Interrupted,
    NotBootstrapped,
    RolledBack,
    StorageFailed,
)
from edgert.printable import file_error, printable
from edgert.versions.slots import BY_COMMAND, ON_TRIAL, REASON_LENGTH_MAX, RolledBackVersion
from edgert_deploy.devices.claims import HeldClaim, claimed
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import ACTIVATE_S_MAX, CHECK_S_MAX, RemoteDaemon
from edgert_deploy.devices.service import start
from edgert_deploy.devices.transports import LineSink, Transport
from edgert_deploy.rollout.plan import STAGED, Plan, Step, make_plan
from edgert_deploy.rollout.request import DeployRequest
from edgert_deploy.rollout.transfer import Transfer
from edgert_deploy.rollout.trial import Watched, watch_trial


class Result(str, Enum):
    """The result of a deployment on one device, as records and JSON state it."""

    LIVE = "live"
    UNCHANGED = "unchanged"  # the release was live already
    PLANNED = "planned"  # a dry run
    NOT_BEGUN = "not-begun"
    REFUSED = "refused"  # the device may not take this bundle
    FAILED = "failed"
    STOPPED = "stopped"  # the user stopped the deployment; the live version is as before
    ABANDONED = "abandoned"  # the user did not wait for the end; the device alone decides on a version on trial


@dataclass(frozen=True)
class Outcome:
    """The result of a deployment on one device.

    Attributes:
        serving: The release that is live on the device at the end; None if this is unknown.
        sent_bytes: The number of bytes sent; in a dry run, the number of bytes that a deployment would send.
        send_seconds: The duration of the transfer, including the making of a delta.
        watched: The readings of the trial's limits.
        warning: A warning if the release scored less at its build than the release that was live before; else "".
    """

    device: str
    result: Result
    steps: tuple[Step, ...] = ()
    serving: int | None = None
    error: ErrorText | None = None
    seconds: float = 0.0
    sent_bytes: int = 0
    send_seconds: float = 0.0
    watched: Watched | None = None
    warning: str = ""


def deploy_one(request: DeployRequest, device: Device, progress: LineSink) -> Outcome:
    """Deploy to one device. An EdgeRTError or an OSError is not raised, but becomes part of the outcome."""
    begun = time.monotonic()
    try:
        with closing(request.open_transport(device)) as transport:
            outcome = _Deployment(request, device, transport, progress).run()
    except EdgeRTError as error:
        outcome = _failed(device, error)
    except OSError as error:  # about a file on this host, such as a delta that another command removed from the cache
        cause = f"{file_error(error, device.name)} (on this host)"
        outcome = _failed(
            device, StorageFailed(f"{cause}; repair this, then deploy again; {_if_on_trial(request, device)}")
        )
    if outcome.error is not None:
        progress(f"{outcome.result.value} [{outcome.error.code}]")
    return replace(outcome, seconds=round(time.monotonic() - begun, 3))


def abandoned(request: DeployRequest, device: Device) -> Outcome:
    """Return the outcome of a deployment that the user abandoned before its end."""
    text = f"abandoned before its end: {_if_on_trial(request, device)}"
    return _failed(device, Interrupted(text), Result.ABANDONED)


class _Deployment:
    """One deployment in progress."""

    def __init__(self, request: DeployRequest, device: Device, transport: Transport, progress: LineSink) -> None:
        self.request = request
        self.device = device
        self.transport = transport
        self.progress = progress
        self.daemon = RemoteDaemon(transport, device, progress)

    def run(self) -> Outcome:
        if self.request.stop.asked:
            raise Interrupted("interrupted before anything was done")
        facts = self.daemon.named(self._facts())
        plan = make_plan(facts, self.request.offer, self.request.limits)
        transfer = Transfer(self.request, self.daemon, self.progress)
        if self.request.dry_run:
            size = transfer.planned_bytes(facts) if Step.SEND in plan.steps else 0
            return Outcome(self.device.name, Result.PLANNED, plan.steps, sent_bytes=size, warning=plan.warning)
        if not plan.changes_model:
            return self._apply(plan, HeldClaim(self.daemon, "", facts), transfer)
        with claimed(self.daemon, plan.model, self.request.offer.size_bytes, self.request.bytes_per_s) as claim:
            # Another deployment may have ended since the facts were read.
            plan = make_plan(claim.facts, self.request.offer, self.request.limits)
            return self._apply(plan, claim, transfer)

    def _facts(self) -> DeviceStatus:
        try:
            return self.daemon.status()
        except NotBootstrapped:
            if self.request.prepare is None or self.request.dry_run:
                raise
            return self.request.prepare(self.device, self.transport, self.progress)

    def _apply(self, plan: Plan, claim: HeldClaim, transfer: Transfer) -> Outcome:
        """Do the steps of the plan. After a failure, roll the version back."""
        if plan.warning:
            self.progress(f"warning: {plan.warning}")
        on_trial = False
        watched: Watched | None = None
        for step in plan.steps:
            try:
                if self.request.stop.asked:
                    raise Interrupted(f"interrupted before {step.value}")
                self.progress(step.value)
                on_trial = on_trial or step in (Step.ACTIVATE, Step.CHECK)
                watched = self._do(step, plan, claim, transfer) or watched
            except Interrupted as error:
                if step is Step.INSTALL:
                    transfer.remove()
                return self._stopped(plan, claim, step, error)
            except (DeviceUnreachable, HostKeyMismatch) as error:
                if not on_trial:
                    raise
                raise error.with_message(
                    f"{error.message}; release {plan.release} was on trial: {_trial_end(self.request)}"
                ) from error
            except EdgeRTError as error:
                if not on_trial:
                    raise
                return self._rolled_back(plan, claim, step, error)
        self.progress(f"release {plan.release} of {plan.model} is live" + ("" if plan.changes_model else " already"))
        return Outcome(
            self.device.name,
            Result.LIVE if plan.changes_model else Result.UNCHANGED,
            plan.steps,
            plan.release,
            sent_bytes=transfer.sent_bytes,
            send_seconds=round(transfer.send_s, 3),
            watched=watched,
            warning=plan.warning,
        )

    def _do(self, step: Step, plan: Plan, claim: HeldClaim, transfer: Transfer) -> Watched | None:
        """Do one step; return the readings if the step watches limits."""
        match step:
            case Step.START:
                start(self.transport, self.device)
            case Step.SEND:
                transfer.send(claim.facts, claim.has)
            case Step.INSTALL:
                transfer.install(claim)
            case Step.ACTIVATE:
                limits = plan.limits.as_options() if plan.limits else ()
                trial = ("--trial", duration_text(self.request.trial_s))
                claim.call("activate", plan.model, *trial, *limits, timeout_s=ACTIVATE_S_MAX)
            case Step.CHECK:
                claim.call("check", plan.model, timeout_s=CHECK_S_MAX)
            case Step.WATCH:
                return watch_trial(claim, plan, self.request.stop, self.progress)
            case Step.MARK_GOOD:
                claim.call("mark-good", plan.model)
        return None

    def _stopped(self, plan: Plan, claim: HeldClaim, step: Step, cause: Interrupted) -> Outcome:
        """End a deployment that the user stopped."""
        if step in (Step.START, Step.SEND, Step.INSTALL):
            return _failed(self.device, Interrupted(f"{cause.message}: the live version did not change"))
        try:
            now = _live_release(self._roll_back(plan, claim), plan)
        except EdgeRTError as error:
            raise Interrupted(
                f"{cause.message}, and the rollback failed [{error.code}]: {error.message}; a trial ends by itself"
            ) from error
        message = f"{cause.message}: release {plan.release} was rolled back. {_live_text(now)}"
        return replace(_failed(self.device, Interrupted(message)), serving=now)

    def _rolled_back(self, plan: Plan, claim: HeldClaim, step: Step, cause: EdgeRTError) -> Outcome:
        """Roll a failed version back, so that it is neither live, nor on trial, nor staged."""
        failed = f"release {plan.release} of {plan.model} failed at {step.value} [{cause.code}]: {cause.message}"
        if isinstance(cause, RolledBack):  # the device rolled back by itself and gave the reason
            failed = cause.message
        try:
            facts = self._roll_back(plan, claim, printable(failed, REASON_LENGTH_MAX))
        except EdgeRTError as error:
            raise cause.with_message(
                f"{failed}; and the rollback failed, too [{error.code}]: {error.message}"
            ) from error
        before, after = _own_roll_back(claim.facts, plan), _own_roll_back(facts, plan)
        if after not in (None, before) and after.reason != BY_COMMAND and after.reason not in failed:
            # The device ended the trial between two steps of the host, and the error only says that there is no trial.
            failed = f"{self.device.name}: release {plan.release} of {plan.model} was rolled back: {after.reason}"
        now = _live_release(facts, plan)
        return replace(_failed(self.device, RolledBack(f"{failed}. {_live_text(now, 'again')}")), serving=now)

    def _roll_back(self, plan: Plan, claim: HeldClaim, reason: str = BY_COMMAND) -> DeviceStatus:
        """Roll back a version that is on trial or staged; return the device's facts after the rollback.

        The model may have been removed. Raises StorageFailed if its slots cannot be read.
        """
        facts = self.daemon.status()
        model = facts.model(plan.model)
        if model is not None and model.damaged:
            raise StorageFailed(model.damaged)
        if model is not None and model.state in (*ON_TRIAL, *STAGED):
            claim.call("rollback", plan.model, "--reason", reason, timeout_s=ACTIVATE_S_MAX)
            facts = self.daemon.status()
        return facts


def _failed(device: Device, error: EdgeRTError, result: Result = Result.FAILED) -> Outcome:
    if isinstance(error, BundleError) and not isinstance(error, BundleCorrupt):  # the next transfer may be undamaged
        result = Result.REFUSED
    elif isinstance(error, Interrupted) and result is Result.FAILED:
        result = Result.STOPPED
    return Outcome(device.name, result, error=ErrorText.of(error))


def _if_on_trial(request: DeployRequest, device: Device) -> str:
    """Return a text about a device on which the release may be on trial."""
    manifest = request.offer.manifest
    return (
        f"if release {manifest.release} of {manifest.model} is on trial on {device.name}, the device decides: "
        f"{_trial_end(request)}; see the result with: edgert status {device.name}"
    )


def _trial_end(request: DeployRequest) -> str:
    """Return a text that tells how the trial ends if the host does nothing."""
    if request.limits is not None and request.limits.unattended:
        return "the device keeps the release if all limits hold, else it rolls the release back"
    lasts_s = request.trial_s + (request.limits.trial_s if request.limits else 0.0)
    return f"the trial ends by itself after {lasts_s:g} s, then the previous version is live again"


def _live_release(facts: DeviceStatus, plan: Plan) -> int | None:
    model = facts.model(plan.model)
    return None if model is None else model.release


def _own_roll_back(facts: DeviceStatus, plan: Plan) -> RolledBackVersion | None:
    """Return the device's record of a rollback of the plan's version; None if there is no record."""
    model = facts.model(plan.model)
    returned = None if model is None else model.rolled_back
    return returned if returned is not None and returned.digest == plan.digest else None


def _live_text(release: int | None, again: str = "") -> str:
    return "Nothing is live now" if release is None else f"Release {release} is live {again}".rstrip()
