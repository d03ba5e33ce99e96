"""The state of a trial, as types: the daemon's measurements, and the output of `edgertd trial --json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from edgert.typed_json import FLAT, OMITTED
from edgert.versions.trial_limits import Readings, TrialLimits


class TrialPhase(str, Enum):
    """The phase of a watch of trial limits."""

    WATCHING = "watching"
    FILLING = "filling"  # the worker sends golden samples to itself
    HELD = "held"  # all limits held
    BROKEN = "broken"  # a limit did not hold


class TrialState(str, Enum):
    """The state of the trial of a version that was not rolled back."""

    LOADING = "loading"
    WATCHING = "watching"
    FILLING = "filling"  # golden samples are sent
    HELD = "held"  # all limits held: the host decides
    OPEN = "open"  # the trial has no limits
    KEPT = "kept"
    NONE = "none"  # this device knows no trial of the version

    @property
    def under_way(self) -> bool:
        """Whether the device has not judged the limits yet."""
        return self in (TrialState.LOADING, TrialState.WATCHING, TrialState.FILLING)


@dataclass(frozen=True)
class TrialStatus:
    """The watch of a trial's limits, in progress or ended.

    `text` has the `readings` for people. `doubt` is a warning if only few answers were compared.
    """

    release: int
    phase: TrialPhase
    left_s: float
    readings: Readings
    text: str
    doubt: str = ""

    @property
    def under_way(self) -> bool:
        return self.phase in (TrialPhase.WATCHING, TrialPhase.FILLING)


@dataclass(frozen=True)
class TrialAnswer:
    """The trial of the version `digest` of a model.

    `release` is None if this device does not have the version. `trial_left_s` is None if the version is not on trial.
    `watch` is None if the daemon measured nothing or does not answer.
    """

    model: str
    state: TrialState
    release: int | None
    digest: str
    trial_left_s: float | None = field(default=None, metadata={OMITTED: True})
    trial_limits: TrialLimits | None = field(default=None, metadata={OMITTED: True})
    watch: TrialStatus | None = field(default=None, metadata={FLAT: True})
