"""The limits of a trial, from the project's edgert.toml and the command line.

    [trial]                   # for every model
    watch = "10m"
    temp_c = 80
    error_share = "0.1%"
    unattended = false        # true: the device marks the version good without the host if all limits held

    [trial.digits]            # overrides the lines above for this model
    p99_ms = 8
    agreement = "99%"

The command line takes precedence over both tables; `off` removes a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgert.durations import duration_s
from edgert.errors import ConfigInvalid
from edgert.toml_file import about
from edgert.versions.trial_limits import LIMIT_NAMES, WATCH_S, TrialLimits, limit_value

_OTHER_KEYS = ("watch", "unattended")


def limits_for(
    model: str,
    table: Mapping[str, Any],
    limits: Mapping[str, float | None],
    watch_s: float | None = None,
    unattended: bool | None = None,
    trial_s: float = 60.0,
) -> TrialLimits | None:
    """Return the limits of `model`; None if there is no limit and no watch. Raises ConfigInvalid.

    Args:
        table: The table `[trial]` of the project.
        limits: The limits of the command line; None removes a limit.
        watch_s, unattended: The options of the command line; None for an option that is not given.
        trial_s: The time that the host has to mark the version good, unless the device does it unattended.
    """
    merged = {**_merged(table, model), **limits}
    if watch_s is not None:
        merged["watch"] = watch_s
    if unattended is not None:
        merged["unattended"] = unattended
    bounds = {name: value for name, value in merged.items() if name in LIMIT_NAMES and value is not None}
    if not bounds and "watch" not in merged:
        if merged.get("unattended"):
            raise ConfigInvalid("unattended needs a watch: give a limit or a time to watch as well")
        return None
    return TrialLimits(bounds, merged.get("watch", WATCH_S), bool(merged.get("unattended", False)), trial_s)


def check_table(table: Any) -> dict[str, Any]:
    """Return `table` if every line in it is valid. Raises ConfigInvalid."""
    if not isinstance(table, dict):
        raise ConfigInvalid(f"[trial] must be a table, got {table!r}: write it as a heading, and the limits below it")
    for model in [key for key, value in table.items() if isinstance(value, dict)] or [""]:
        _merged(table, model)
    return table


def _merged(table: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the lines of `[trial]`. Lines of `[trial.MODEL]` override them."""
    general = {key: limit for key, limit in table.items() if not isinstance(limit, dict)}
    own = table.get(model)  # this is a line of [trial], and no table, if the model has the name `watch`
    return {**_read(general, "[trial]"), **_read(own if isinstance(own, dict) else {}, f"[trial.{model}]")}


def _read(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    with about(where):
        for key, limit in table.items():
            if key == "unattended" and isinstance(limit, bool):
                limits[key] = limit
            elif key == "watch" and isinstance(limit, str):
                limits[key] = duration_s(limit)
            elif key in LIMIT_NAMES and isinstance(limit, (int, float, str)) and not isinstance(limit, bool):
                limits[key] = limit_value(key, limit)
            else:
                known = ", ".join((*LIMIT_NAMES, *_OTHER_KEYS))
                raise ConfigInvalid(f"{key} = {limit!r} is invalid; known: {known}")
    return limits
