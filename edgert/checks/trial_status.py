"""The state of a trial, as types: what the daemon measures, and what `edgertd trial --json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from edgert.typed_json import FLAT, OMITTED
from edgert.versions.trial_limits import Readings, TrialLimits


class TrialPhase(str, Enum):
    """The phase of a watch of trial limits."""

    WATCHING = "watching"
    FILLING = "filling"  # the worker asks itself golden samples
    HELD = "held"  # all limits held
    BROKEN = "broken"  # one did not


class TrialState(str, Enum):
    """The state of the trial of a version that was not rolled back."""

    LOADING = "loading"
    WATCHING = "watching"
    FILLING = "filling"  # golden samples are sent
    HELD = "held"  # all limits held: the host decides
    OPEN = "open"  # it has no limits
    KEPT = "kept"
    NONE = "none"  # this device knows no trial of the version

    @property
    def under_way(self) -> bool:
        """Whether the device has not judged the limits yet."""
        return self in (TrialState.LOADING, TrialState.WATCHING, TrialState.FILLING)


@dataclass(frozen=True)
class TrialStatus:
    """The watch of a trial's limits, in progress or ended.

    `text` is `readings` for people, `doubt` a sentence about limits that held on few answers.
    """

    release: int
    phase: TrialPhase
    left_s: float
    readings: Readings
    text: str
    doubt: str = ""


@dataclass(frozen=True)
class TrialAnswer:
    """The trial of a version. `release` is None if this device does not have the version.

    `trial_left_s` is None unless it is on trial. `watch` is None if the daemon measured nothing, or does not answer.
    """

    model: str
    state: TrialState
    release: int | None
    digest: str
    trial_left_s: float | None = field(default=None, metadata={OMITTED: True})
    trial_limits: TrialLimits | None = field(default=None, metadata={OMITTED: True})
    watch: TrialStatus | None = field(default=None, metadata={FLAT: True})
