"""What devices should serve, by the rollouts that this host keeps, and how far they are from it. Pure.

Wanted of a device is, model by model, the release of the newest rollout that names the device. A rollout that was given
up counts only where it had come: there it was not taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgert import __version__
from edgert_deploy.devices.facts import version as numbers
from edgert_deploy.rollout.rollout import ABORTED, Rollout

ON_TRIAL = ("trial", "first-trial")
SERVES = ("ready", "degraded", "unloaded")


@dataclass(frozen=True)
class Wanted:
    """A release, and the rollout that brought it or was to."""

    release: int
    digest: str
    rollout: str


@dataclass(frozen=True)
class Drift:
    """One way in which a device is not as wanted. `kind` is a word for programs, `text` says it to people.

    Kinds: behind, ahead, other-digest, missing, damaged, trial, rolled-back, degraded, not-serving, stopped, runtime.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class ModelDrift:
    """A model on a device: what is live (None: nothing), what is wanted (None: no rollout of this host says)."""

    model: str
    live: int | None
    wanted: Wanted | None
    drift: tuple[Drift, ...]

    def as_json(self) -> dict[str, Any]:
        wanted = None if self.wanted is None else asdict(self.wanted)
        return {"model": self.model, "live": self.live, "wanted": wanted, "drift": [asdict(one) for one in self.drift]}


def wanted_of(rollouts: Iterable[Rollout], inventory: str) -> dict[str, dict[str, Wanted]]:
    """By device and model, from rollouts over the inventory of that path; `rollouts` come newest first."""
    found: dict[str, dict[str, Wanted]] = {}
    for rollout in rollouts:
        if rollout.inventory != inventory:  # names mean other devices there
            continue
        for device in rollout.devices:
            if rollout.state != ABORTED or rollout.took(device):
                wanted = Wanted(rollout.release, rollout.digest, rollout.id)
                found.setdefault(device, {}).setdefault(rollout.model, wanted)
    return found


def model_drifts(status: Mapping[str, Any], wanted: Mapping[str, Wanted]) -> list[ModelDrift]:
    """Each model that is there or wanted there, by what `edgertd status` says."""
    there = {str(model["model"]): model for model in status["models"]}
    return [_model(name, there.get(name), wanted.get(name)) for name in dict.fromkeys((*there, *wanted))]


def device_drifts(status: Mapping[str, Any], own_version: str = __version__) -> list[Drift]:
    """What concerns the whole device: its daemon, its version of edgert."""
    found = []
    if not status["daemon"]["running"]:
        found.append(Drift("stopped", "the daemon does not run"))
    theirs = str(status["edgert"])
    if theirs != own_version:
        older = "older" if numbers(theirs) < numbers(own_version) else "other"
        found.append(Drift("runtime", f"its edgert is {theirs}, {older} than this host's {own_version}"))
    return found


def _model(name: str, there: Mapping[str, Any] | None, wanted: Wanted | None) -> ModelDrift:
    if there is None:
        assert wanted is not None  # the caller has taken it from one of the two
        return ModelDrift(
            name, None, wanted, (Drift("missing", f"release {wanted.release} is wanted, nothing is there"),)
        )
    if there.get("damaged"):
        return ModelDrift(name, None, wanted, (Drift("damaged", str(there["damaged"])),))
    active = there["active"]
    release = None if active is None else int(active["release"])
    drift = [] if wanted is None else _against(there, wanted, release)
    serving = there.get("serving") or {}
    if there["state"] in ON_TRIAL:
        watch = serving.get("watch") or {}
        how = f": {watch['text']}; {watch['left_s']:.0f} s are left" if watch.get("phase") == "watching" else ""
        drift.append(Drift("trial", f"release {release} is on trial{how}"))
    if active is not None and serving and serving.get("state") not in SERVES:
        drift.append(Drift("not-serving", f"is {serving['state']}: {serving.get('fault') or 'it may come'}"))
    if serving.get("degraded"):
        drift.append(Drift("degraded", f"not on its first engine: {'; '.join(serving.get('tried', []))}"))
    return ModelDrift(name, release, wanted, tuple(drift))


def _against(there: Mapping[str, Any], wanted: Wanted, release: int | None) -> list[Drift]:
    """How the live version differs from the wanted one."""
    active, returned = there["active"], there.get("returned")
    if active is not None and active["digest"] == wanted.digest:
        return []
    if returned is not None and returned["digest"] == wanted.digest:
        return [Drift("rolled-back", f"release {wanted.release} went back: {returned['reason']}")]
    if release is None:
        return [Drift("missing", f"release {wanted.release} is wanted, nothing is live")]
    if release == wanted.release:
        return [Drift("other-digest", f"release {release} is another content than the one of {wanted.rollout}")]
    kind = "behind" if release < wanted.release else "ahead"
    return [Drift(kind, f"release {release} is live, {wanted.release} is wanted ({wanted.rollout})")]
