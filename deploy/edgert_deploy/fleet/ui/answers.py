"""The answers of the page's API besides its stream: lists of devices, one device, curves, events. Plain JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from edgert.errors import ConfigInvalid
from edgert.names import ID, ID_CHARS_MAX
from edgert.telemetry.spans import STAGES
from edgert_deploy.fleet.model import DeviceState
from edgert_deploy.fleet.ui.board import ATTENTION, STATES, Filter, Seen
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.hub import Hub

A_PAGE = 50
SEARCH_CHARS_MAX = 100
# The orders of a list of devices.
SORTS: dict[str, Callable[[Seen], Any]] = {
    "state": lambda seen: (
        STATES.index(seen.state),
        -seen.since_ms if seen.state in ATTENTION else 0,
        seen.held.site,
        seen.held.device,
    ),
    "device": lambda seen: (seen.held.site, seen.held.device),
    "p99": lambda seen: -max((line.p99_ms or 0.0 for line in list(seen.held.models.values())), default=0.0),
    "since": lambda seen: -seen.since_ms,
}


class NotHere(ConfigInvalid):
    """Nothing has that name."""


@dataclass(frozen=True)
class Answers:
    """Answers the page's requests. `site` is the only one that is received, if there is one."""

    hub: Hub
    history: History
    site: str | None = None

    def filter(self, asked: Mapping[str, str]) -> Filter:
        """Raises ConfigInvalid."""
        words = {each.name: asked.get(each.name, "") for each in fields(Filter)}
        for name, word in words.items():
            if word and (len(word) > ID_CHARS_MAX or not ID.match(word)):
                raise ConfigInvalid(f"{name}={word[:80]!r} is not a valid name")
        if self.site is not None:
            words["site"] = self.site
        return Filter(**words)

    def answer(self, path: str, asked: Mapping[str, str]) -> dict[str, Any]:
        """Raises NotHere, ConfigInvalid or StoreFailed."""
        chosen, window = self.filter(asked), asked.get("window", "1h")
        if path == "history":
            curves = self.history.curves(window, {**chosen.where(), **self._device(asked)})
            numbers = {each["model"]: self.hub.board.numbers(each["model"]) for each in curves["models"]}
            return {**curves, "numbers": numbers, "newest_ms": self.history.newest_ms()}
        if path == "events":
            return self.history.events(window, {**chosen.where(), **self._device(asked)})
        if path == "stages":
            return {"stages": self.hub.board.stages(chosen)}
        if path == "devices":
            return self.devices(chosen, asked)
        if path == "rollouts":
            return {"rollouts": self.hub.rollouts.shown}
        if path == "device":
            return self.device(asked)
        raise NotHere(f"no such address: /api/{path[:80]}")

    def devices(self, chosen: Filter, asked: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of devices. `state` is one of STATES, `attention` for all but online, or ""; `q` is part of a name."""
        state, part, sort = asked.get("state", ""), asked.get("q", "")[:SEARCH_CHARS_MAX].lower(), asked.get("sort", "state")  # fmt: skip
        if state not in ("", "attention", *STATES):
            raise ConfigInvalid(
                f"state={state[:20]!r} is not a state of a device; known: attention, {', '.join(STATES)}"
            )
        if sort not in SORTS:
            raise ConfigInvalid(f"sort={sort[:20]!r} is unknown; known: {', '.join(SORTS)}")
        states = ATTENTION if state == "attention" else (state,) if state else STATES
        found = [
            seen
            for seen in self.hub.board.seen(chosen, self.hub.clock())
            if seen.state in states and part in f"{seen.held.site}/{seen.held.device}".lower()
        ]
        found.sort(key=SORTS[sort])
        pages = max(1, -(-len(found) // A_PAGE))
        page = min(max(1, _number(asked.get("page", "1"))), pages)
        rows = [_row(seen) for seen in found[(page - 1) * A_PAGE : page * A_PAGE]]
        return {"total": len(found), "page": page, "pages": pages, "devices": rows}

    def device(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """Return everything that is known of one device."""
        site, device = asked.get("site", ""), asked.get("device", "")
        seen = self.hub.board.seen_device(site, device, self.hub.clock())
        if seen is None:
            raise NotHere(f"no device {site[:64]}/{device[:64]} is known here")
        said = {name: dict(seen.held.fields.get(name, {})) for name in ("info", "sys", "deploy")}
        return {**_row(seen), "late_s": round(seen.held.late_s), "window_s": seen.held.window_s, **said}

    def _device(self, asked: Mapping[str, str]) -> dict[str, str]:
        device = asked.get("device", "")
        if device and (len(device) > ID_CHARS_MAX or not ID.match(device)):
            raise ConfigInvalid(f"device={device[:80]!r} is not a valid name")
        return {"device": device} if device else {}


def _row(seen: Seen) -> dict[str, Any]:
    held = seen.held
    return {
        "site": held.site,
        "device": held.device,
        "profile": held.profile,
        "state": seen.state,
        "why": seen.why,
        "since_ms": seen.since_ms,
        "alarms": list(seen.alarms),
        "models": _models(held),
    }


def _models(held: DeviceState) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "version": line.version,
            "ts_ms": line.ts_ms,
            "per_s": None if line.per_s is None else round(line.per_s, 3),
            "p50_ms": line.p50_ms,
            "p99_ms": line.p99_ms,
            "requests": line.requests,
            "errors": line.errors,
            "batch_mean": line.batch_mean,
            "rss_bytes": line.rss_bytes,
            "alarms": list(held.alarms.get(model, ())),
            "stages_ms": dict(zip(STAGES, line.stages_ms, strict=False)),
        }
        for model, line in sorted(held.models.items())
        if line.version
    ]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 9 else 1
