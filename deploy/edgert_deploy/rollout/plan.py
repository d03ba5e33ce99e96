"""From a device's facts and a bundle to the steps that make it live there, or the reason why not. Pure.

What a plan refuses costs the device nothing, not a byte. The device checks everything again when it installs:
a plan is advice, the device's own refusal is the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from edgert.bundle.manifest import ArtifactEntry, Manifest, TargetEntry
from edgert.checks.status import DeviceStatus, ModelStatus
from edgert.errors import (
    DeviceError,
    EngineMissing,
    ReleaseTooOld,
    SignatureInvalid,
    StorageFailed,
    TransitionRefused,
)
from edgert.versions.slots import Version
from edgert.versions.trial_limits import TrialLimits

LIMITS_FORMATS = (1,)
SPARE_BYTES = 32 * 1024**2  # stays free for state, logs and the spool


class Step(str, Enum):
    """One thing done to a device, in the order in which a plan lists them."""

    START = "start"
    SEND = "send"
    INSTALL = "install"
    ACTIVATE = "activate"
    CHECK = "check"
    WATCH = "watch"
    MARK_GOOD = "mark-good"


@dataclass(frozen=True)
class Offer:
    """A verified bundle, as far as a plan needs it."""

    manifest: Manifest
    digest: str
    key_ids: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class Plan:
    """The steps for one device; none where the very same content is live and good already.

    `limits` holds the limits that are watched: those of a trial under way where nobody asked for others.
    """

    model: str
    release: int
    digest: str
    steps: tuple[Step, ...]
    limits: TrialLimits | None = None


def make_plan(facts: DeviceStatus, offer: Offer, limits: TrialLimits | None = None) -> Plan:
    """The steps, under `limits` on trial. Raises what the device would answer: SignatureInvalid, NotCompatible, ReleaseTooOld, TransitionRefused,
    EngineMissing or StorageFailed."""
    manifest = offer.manifest
    model = facts.model(manifest.model)
    if not set(offer.key_ids) & set(facts.keys):
        raise SignatureInvalid(
            f"the bundle is signed by key {', '.join(offer.key_ids)}; {facts.device} trusts "
            f"{', '.join(facts.keys) or 'none'}: sign with a trusted key (edgert build --key), "
            f"or add the key to the device (edgert bootstrap {facts.device} --key)"
        )
    if model is not None and model.damaged:
        raise StorageFailed(f"{facts.device}: {model.damaged}")
    target = manifest.target_for(facts.profile, facts.machine)
    _check_release(manifest, offer.digest, model, facts.device)
    _check_engine([manifest.artifact(name) for name in target.artifacts], facts)
    if limits is None and model is not None and _is(model.live, offer.digest):
        limits = model.trial_limits
    steps = _steps(model, offer.digest, limits)
    if Step.WATCH in steps and limits is not None:
        _check_limits(limits, facts, model if Step.ACTIVATE not in steps else None)
    if Step.SEND in steps:
        _check_disk(offer, target, facts)
    if not facts.daemon.running:
        steps = (Step.START, *steps)
    return Plan(manifest.model, manifest.release, offer.digest, steps, limits)


def _steps(model: ModelStatus | None, digest: str, limits: TrialLimits | None) -> tuple[Step, ...]:
    """The whole way, or what an earlier deployment of the same content left to do."""
    make_live: tuple[Step, ...] = (Step.ACTIVATE, Step.CHECK, Step.MARK_GOOD)
    if limits is not None:
        keep = () if limits.unattended else (Step.MARK_GOOD,)
        make_live = (Step.ACTIVATE, Step.CHECK, Step.WATCH, *keep)
    if model is not None and _is(model.live, digest):
        return () if model.live is not None and model.live.good else make_live[1:]
    if model is not None and model.state in ("staged", "first-staged") and _is(model.spare, digest):
        return make_live
    return (Step.SEND, Step.INSTALL, *make_live)


def _check_release(manifest: Manifest, digest: str, model: ModelStatus | None, device: str) -> None:
    if model is None or _is(model.live, digest):
        return
    if model.on_trial:
        raise TransitionRefused(
            f"another version of {manifest.model} is on trial on {device}: wait for its end, "
            f"or end it with: edgert rollback {manifest.model} --on {device}"
        )
    if manifest.release < model.ratchet and not manifest.downgrade:
        raise ReleaseTooOld(
            f"release {manifest.release} of {manifest.model} is older than {model.ratchet}, which was live on {device}: "
            f"build with --release {model.ratchet + 1}, or sign a way back with --downgrade"
        )


def _check_limits(limits: TrialLimits, facts: DeviceStatus, on_trial: ModelStatus | None) -> None:
    if facts.limits_format not in LIMITS_FORMATS:
        raise DeviceError(
            f"the edgertd of {facts.device} ({facts.edgert}) watches no limits: edgert bootstrap {facts.device} brings "
            "it up to date, or deploy without --limit and --watch"
        )
    if "temp_c" in limits.bounds and facts.temp_c is None:
        raise TransitionRefused(
            f"{facts.device} has no thermometer that can be read: leave the limit temp_c out for it (--limit temp_c=off)"
        )
    if on_trial is not None and on_trial.state == "first-trial":  # it left out what needs a version before
        limits = replace(limits, bounds={name: value for name, value in limits.bounds.items() if name != "agreement"})
    if on_trial is not None and (on_trial.trial_limits is None or not on_trial.trial_limits.same_as(limits)):
        raise TransitionRefused(
            f"the same release is on trial on {facts.device} already, under other limits: wait for its end, or end it "
            f"with: edgert rollback MODEL --on {facts.device}"
        )


def _check_engine(artifacts: Sequence[ArtifactEntry], facts: DeviceStatus) -> None:
    wanted = [artifact.engine for artifact in artifacts]
    if not any(engine in facts.engines for engine in wanted):
        raise EngineMissing(
            f"{facts.device} has none of the engines that the bundle is for ({', '.join(dict.fromkeys(wanted))}); it has "
            f"{', '.join(facts.engines) or 'none'}: edgert bootstrap {facts.device} --engines {wanted[0]}"
        )


def _check_disk(offer: Offer, target: TargetEntry, facts: DeviceStatus) -> None:
    """The bundle on its way in and its unpacked part lie there at the same time."""
    need = offer.size_bytes + sum(entry.size_bytes for entry in offer.manifest.files_for(target)) + SPARE_BYTES
    if facts.disk_free_bytes < need:
        raise StorageFailed(
            f"{facts.device} has {facts.disk_free_bytes // 1024**2} MB free, the deployment needs "
            f"{need // 1024**2 + 1} MB: free some space there. Nothing was sent"
        )


def _is(version: Version | None, digest: str) -> bool:
    return version is not None and version.digest == digest
