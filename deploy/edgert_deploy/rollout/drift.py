"""Drift: the difference between wanted and live releases.

This module does no I/O. If a device follows a channel, the device's own record names the wanted release. Otherwise the
newest rollout with this device names the wanted release. An aborted rollout counts only for the devices that have its
release. A rollout does not count for a device that refused its bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgert import __version__
from edgert.checks.status import DeviceStatus, ModelStatus
from edgert.checks.trial_status import TrialPhase
from edgert.versions.slots import BY_COMMAND
from edgert_deploy.devices.facts import version_numbers
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState

SERVING_STATES = ("ready", "degraded", "unloaded")


@dataclass(frozen=True)
class Wanted:
    """A wanted release, with either the id of its rollout or the name of its channel."""

    release: int
    digest: str
    rollout: str = ""
    channel: str = ""

    @property
    def by(self) -> str:
        return self.rollout or f"channel {self.channel}"


@dataclass(frozen=True)
class Drift:
    """One difference. `kind` is for programs, `text` is for people.

    Kinds: behind, ahead, other-digest, missing, damaged, trial, rolled-back, degraded, not-serving, stopped, runtime.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class ModelDrift:
    """A model on a device. `live` is None if no release is live; `wanted` is None if no release is wanted."""

    model: str
    live: int | None
    wanted: Wanted | None
    drift: tuple[Drift, ...]


def wanted_by_rollouts(rollouts: Iterable[Rollout], inventory: str) -> dict[str, dict[str, Wanted]]:
    """Return the wanted releases by device and model. `rollouts` start with the newest."""
    by_device: dict[str, dict[str, Wanted]] = {}
    for rollout in rollouts:
        if rollout.inventory != inventory:  # in another inventory, the same names may mean other devices
            continue
        for device in rollout.devices:
            if rollout.has_release(device) or not (rollout.state is RolloutState.ABORTED or rollout.refused(device)):
                wanted = Wanted(rollout.release, rollout.digest, rollout.id)
                by_device.setdefault(device, {}).setdefault(rollout.model, wanted)
    return by_device


def model_drifts(status: DeviceStatus, wanted: Mapping[str, Wanted]) -> tuple[ModelDrift, ...]:
    """Return the drift of each model on the device, and of each model that should be on it.

    `wanted` has the releases that rollouts want, by model.
    """
    by_model, channel = {model.model: model for model in status.models}, status.channel
    followed = {
        name: Wanted(entry.release, entry.digest, channel=channel.channel) for name, entry in channel.wanted.items()
    }
    wanted = {**wanted, **followed}
    names = dict.fromkeys((*by_model, *wanted))
    return tuple(_model(name, by_model.get(name), wanted.get(name)) for name in names)


def device_drifts(status: DeviceStatus, own_version: str = __version__, own_code: str = "") -> tuple[Drift, ...]:
    """Return the drift of the device itself: a stopped daemon, or another edgert than this host's.

    `own_code` is the digest of this host's code. With "", only the versions are compared.
    """
    drifts = []
    if not status.daemon.running:
        drifts.append(Drift("stopped", "the daemon is not running"))
    if status.edgert != own_version:
        how = "older than" if version_numbers(status.edgert) < version_numbers(own_version) else "different from"
        drifts.append(Drift("runtime", f"its edgert is {status.edgert}, {how} this host's {own_version}"))
    elif status.code and own_code and status.code != own_code:
        drifts.append(Drift("runtime", f"its edgert {status.edgert} has other code than this host's {own_version}"))
    return tuple(drifts)


def _model(name: str, there: ModelStatus | None, wanted: Wanted | None) -> ModelDrift:
    if there is None:
        assert wanted is not None  # the model is installed or wanted, or both
        text = f"release {wanted.release} is wanted, but the model is not installed"
        return ModelDrift(name, None, wanted, (Drift("missing", text),))
    if there.damaged:
        return ModelDrift(name, None, wanted, (Drift("damaged", there.damaged),))
    drift = [] if wanted is None else _release_drift(there, wanted)
    serving = there.serving
    if there.on_trial:
        trial = None if serving is None else serving.trial
        how = f": {trial.text}; {trial.left_s:.0f} s left" if trial and trial.phase is TrialPhase.WATCHING else ""
        drift.append(Drift("trial", f"release {there.release} is on trial{how}"))
    if there.live is not None and serving is not None and serving.state not in SERVING_STATES:
        drift.append(Drift("not-serving", f"is {serving.state}: {serving.fault or 'it may become ready'}"))
    if serving is not None and serving.loaded is not None and serving.loaded.degraded:
        drift.append(Drift("degraded", f"does not run on its first engine: {'; '.join(serving.loaded.tried)}"))
    return ModelDrift(name, there.release, wanted, tuple(drift))


def _release_drift(there: ModelStatus, wanted: Wanted) -> list[Drift]:
    """Return the differences between the live version and the wanted release."""
    release, failed = there.release, there.rolled_back
    if there.live is not None and there.live.digest == wanted.digest:
        return []
    if failed is not None and failed.digest == wanted.digest:
        how = BY_COMMAND if failed.reason == BY_COMMAND else f"rolled back: {failed.reason}"
        return [Drift("rolled-back", f"release {wanted.release} was {how}")]
    if release is None:
        return [Drift("missing", f"release {wanted.release} is wanted, but no version is live")]
    if release == wanted.release:
        return [
            Drift(
                "other-digest", f"release {release} has other content than the release {wanted.release} of {wanted.by}"
            )
        ]
    kind = "behind" if release < wanted.release else "ahead"
    return [Drift(kind, f"release {release} is live, but release {wanted.release} is wanted ({wanted.by})")]
