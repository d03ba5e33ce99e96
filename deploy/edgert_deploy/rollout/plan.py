"""The plan: the steps that make a bundle live on one device, or the reason for a refusal.

This module does no I/O. The plan predicts a refusal before the host sends a byte. The device checks everything again at
the installation, and only the device's decision is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from edgert.bundle.manifest import ROUNDING_MARGIN, Accuracy, ArtifactEntry, Manifest, TargetEntry
from edgert.checks.status import LIMITS_FORMAT, DeviceStatus, ModelStatus
from edgert.engines import FOR_TESTS
from edgert.errors import (
    DeployUnderWay,
    DeviceError,
    EngineMissing,
    ReleaseTooOld,
    SignatureInvalid,
    StorageFailed,
    TransitionRefused,
)
from edgert.printable import counted
from edgert.versions.slots import Version
from edgert.versions.trial_limits import TrialLimits

SPARE_BYTES = 32 * 1024**2  # this space stays free for state, logs and the spool
STAGED = ("staged", "first-staged")
LOWER_SCORE_MAX = 0.01  # a larger loss of score against the live release gives a warning


class Step(str, Enum):
    """A step of a plan, in the order of execution."""

    START = "start"
    SEND = "send"
    INSTALL = "install"
    ACTIVATE = "activate"
    CHECK = "check"
    WATCH = "watch"
    MARK_GOOD = "mark-good"


@dataclass(frozen=True)
class Offer:
    """The properties of a verified bundle that a plan needs."""

    manifest: Manifest
    digest: str
    key_ids: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class Plan:
    """The steps for one device. There are no steps if the content is live and good already.

    Without `limits` of the user, a running trial keeps its own. There is a `warning` if the release scored less at its
    build than the live release.
    """

    model: str
    release: int
    digest: str
    steps: tuple[Step, ...]
    limits: TrialLimits | None = None
    warning: str = ""

    @property
    def changes_model(self) -> bool:
        """Whether a step changes the model. Other plans have no step, or only start the daemon."""
        return any(step is not Step.START for step in self.steps)


def make_plan(facts: DeviceStatus, offer: Offer, limits: TrialLimits | None = None) -> Plan:
    """Return the plan for a device with `facts`. The device watches `limits` on trial.

    Raises the error that the device would return: SignatureInvalid, NotCompatible, ReleaseTooOld, TransitionRefused,
    DeployUnderWay, EngineMissing or StorageFailed. Also raises DeviceError if the device cannot watch limits.
    """
    manifest = offer.manifest
    model = facts.model(manifest.model)
    if not set(offer.key_ids) & set(facts.keys):
        raise SignatureInvalid(
            f"the bundle is signed by key {', '.join(offer.key_ids)}; {facts.device} trusts "
            f"{', '.join(facts.keys) or 'none'}: sign with a trusted key (edgert build MODEL --key FILE), "
            f"or add the key to the device (edgert bootstrap {facts.device} --key FILE)"
        )
    if model is not None and model.damaged:
        raise StorageFailed(f"{facts.device}: {model.damaged}")
    target = manifest.target_for(facts.profile, facts.machine)
    _check_release(manifest, offer.digest, model, facts)
    if manifest.text is not None and not facts.text:
        raise EngineMissing(
            f"{facts.device} cannot serve a model that takes text: its environment lacks the package tokenizers. Install it: "
            f"edgert bootstrap {facts.device} --with text"
        )
    _check_engine([manifest.artifact(name) for name in target.artifacts], facts)
    if limits is None and model is not None and _has_digest(model.live, offer.digest):
        limits = model.trial_limits
    steps = _steps(model, offer.digest, limits)
    if Step.WATCH in steps and limits is not None:
        _check_limits(limits, facts, model if Step.ACTIVATE not in steps else None)
    if Step.SEND in steps:
        _check_disk(offer, target, facts)
    warning = ""
    if model is not None and model.live is not None and Step.ACTIVATE in steps:
        warning = lower_score(f"release {model.live.release}, live before,", model.accuracy, manifest, target)
    if not facts.daemon.running:
        steps = (Step.START, *steps)
    return Plan(manifest.model, manifest.release, offer.digest, steps, limits, warning)


def lower_score(other: str, accuracy: Accuracy | None, manifest: Manifest, target: TargetEntry) -> str:
    """Return a warning if a new release scored clearly less at its build than another release; else "".

    The accuracy gate cannot detect a lower score, because the gate compares an artifact only with its own FP32 source.

    Args:
        other: The text that names the other release in the warning.
        accuracy: The accuracy of the other release.
        manifest: The manifest of the new release.
        target: The target of the new release.
    """
    new = manifest.artifact(target.artifacts[0]).accuracy
    if accuracy is None or accuracy.metric != new.metric:
        return ""
    if accuracy.artifact - new.artifact <= LOWER_SCORE_MAX + ROUNDING_MARGIN:
        return ""
    return (
        f"release {manifest.release} of {manifest.model} scored {new.artifact:.4f} at its build ({new.metric}, "
        f"{counted(new.samples, 'sample')}); {other} scored {accuracy.artifact:.4f} "
        f"({counted(accuracy.samples, 'sample')})"
    )


def _steps(model: ModelStatus | None, digest: str, limits: TrialLimits | None) -> tuple[Step, ...]:
    """Return all steps, without those that an earlier deployment of the same content did."""
    make_live: tuple[Step, ...] = (Step.ACTIVATE, Step.CHECK, Step.MARK_GOOD)
    if limits is not None:
        keep = () if limits.unattended else (Step.MARK_GOOD,)
        make_live = (Step.ACTIVATE, Step.CHECK, Step.WATCH, *keep)
    if model is not None and _has_digest(model.live, digest):
        return () if model.live is not None and model.live.good else make_live[1:]
    if model is not None and model.state in STAGED and _has_digest(model.spare, digest):
        return make_live
    return (Step.SEND, Step.INSTALL, *make_live)


def _check_release(manifest: Manifest, digest: str, model: ModelStatus | None, facts: DeviceStatus) -> None:
    if model is None or _has_digest(model.live, digest):
        return
    if not manifest.may_follow(model.ratchet):
        again = f"; edgert rollback {manifest.model} {facts.device} makes it live again"
        raise ReleaseTooOld(
            f"release {manifest.release} of {manifest.model} is older than {model.ratchet}, which was live on "
            f"{facts.device}: build with --release {model.ratchet + 1}, or sign a downgrade with --downgrade-from {model.ratchet}"
            + (again if model.state == "steady" and _has_digest(model.spare, digest) else "")
        )
    if model.on_trial:
        _refuse_during_trial(
            f"another version of {manifest.model} is on trial on {facts.device}", manifest.model, facts
        )


def _refuse_during_trial(found: str, model: str, facts: DeviceStatus) -> None:
    """Raise an error with advice about a running trial.

    The advice depends on a claim: the device refuses a rollback while a deployment holds the claim of the model.
    """
    claim = next((each for each in facts.claims if each.model == model), None)
    if claim is not None:
        raise DeployUnderWay(
            f"{found}, deployed by {claim.by} since {claim.since}: wait for the end of the trial, then try again"
        )
    raise TransitionRefused(f"{found}: wait for its end, or end the trial with: edgert rollback {model} {facts.device}")


def _check_limits(limits: TrialLimits, facts: DeviceStatus, on_trial: ModelStatus | None) -> None:
    if facts.limits_format != LIMITS_FORMAT:
        raise DeviceError(
            f"the edgertd of {facts.device} ({facts.edgert}) watches no limits. Upgrade it with edgert bootstrap "
            f"{facts.device} --upgrade, or deploy without --limit and --watch"
        )
    if "temp_c" in limits.bounds and facts.temp_c is None:
        raise TransitionRefused(
            f"{facts.device} has no readable thermometer: omit the limit temp_c for it (--limit temp_c=off)"
        )
    if on_trial is None:
        return
    if on_trial.state == "first-trial":  # without a previous version, the device left out `agreement`
        limits = replace(limits, bounds={name: value for name, value in limits.bounds.items() if name != "agreement"})
    if on_trial.trial_limits is None or not on_trial.trial_limits.same_as(limits):
        conflict = f"this release of {on_trial.model} is on trial on {facts.device} under other limits"
        _refuse_during_trial(conflict, on_trial.model, facts)


def _check_engine(artifacts: Sequence[ArtifactEntry], facts: DeviceStatus) -> None:
    engines = [artifact.engine for artifact in artifacts]
    if not any(engine in facts.engines for engine in engines):
        there = [engine for engine in facts.engines if engine not in FOR_TESTS]
        raise EngineMissing(
            f"{facts.device} has none of the bundle's engines ({', '.join(dict.fromkeys(engines))}); it has "
            f"{', '.join(there) or 'none'}. Install one: edgert bootstrap {facts.device} --engines {engines[0]}"
        )


def _check_disk(offer: Offer, target: TargetEntry, facts: DeviceStatus) -> None:
    """Check the free space, which must hold the incoming bundle and its unpacked files at the same time."""
    need = offer.size_bytes + sum(entry.size_bytes for entry in offer.manifest.files_for(target)) + SPARE_BYTES
    if facts.disk_free_bytes < need:
        raise StorageFailed(
            f"{facts.device} has {facts.disk_free_bytes // 1024**2} MB free; the deployment needs "
            f"{need // 1024**2 + 1} MB. Nothing was sent; free some space on the device"
        )


def _has_digest(version: Version | None, digest: str) -> bool:
    return version is not None and version.digest == digest
