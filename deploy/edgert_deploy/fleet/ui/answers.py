"""The JSON answers of the page's API, except its stream. All but `device` also exist as CSV rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from edgert.durations import duration_s
from edgert.errors import ConfigInvalid
from edgert.names import ID, ID_CHARS_MAX
from edgert_deploy.fleet.live_fleet import DeviceState
from edgert_deploy.fleet.reports import dimensions_of
from edgert_deploy.fleet.store.query import Question
from edgert_deploy.fleet.store.results import PERCENTILES_DEFAULT, QueryRequest, shares_of, time_text
from edgert_deploy.fleet.ui.fleet_state import ATTENTION, STATES, DeviceView, Filter
from edgert_deploy.fleet.ui.history import EVENTS_EXPORTED_MAX, EVENTS_MAX, History
from edgert_deploy.fleet.ui.live_views import LiveViews
from edgert_deploy.fleet.ui.period import Period

A_PAGE = 50
GROUPS_DEFAULT = 20  # the number of groups of each model in a breakdown
GROUPS_MAX = 50_000  # the maximum number of groups of each model in a breakdown
# With more models on devices than this, a breakdown compares sites, unless the request has `by`. A comparison of
# devices reads a stored row for each model on a device.
COMPARED_MAX = 1000
SEARCH_CHARS_MAX = 100
# The orders of a list of devices.
SORTS: dict[str, Callable[[DeviceView], Any]] = {
    "state": lambda view: (
        STATES.index(view.state),
        -view.since_ms if view.state in ATTENTION else 0,
        view.device.site,
        view.device.device,
    ),
    "device": lambda view: (view.device.site, view.device.device),
    "p99": lambda view: -max((line.p99_ms or 0.0 for line in list(view.device.models.values())), default=0.0),
    "since": lambda view: -view.since_ms,
}


class NotFound(ConfigInvalid):
    """No address or device has the requested name."""


Parameters = Mapping[str, str]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Answers:
    """Answers the page's requests. If `site` is given, the server receives only messages of this site."""

    live_views: LiveViews
    history: History
    site: str | None = None

    def filter(self, parameters: Parameters) -> Filter:
        """Return the filter of a request. Raises ConfigInvalid."""
        words = {field.name: _name(parameters, field.name) for field in fields(Filter)}
        if self.site is not None:
            words["site"] = self.site
        return Filter(**words)

    def answer(self, path: str, parameters: Parameters) -> dict[str, Any]:
        """Return the answer as a JSON value. Raises NotFound, ConfigInvalid or StoreFailed."""
        answers: dict[str, Callable[[Parameters], dict[str, Any]]] = {
            "latency": self.latency,
            "breakdown": self.breakdown,
            "stages": self.stages,
            "query": self.query,
            "events": self.events,
            "devices": self.devices,
            "device": self.device,
            "rollouts": lambda _: {"rollouts": self.live_views.rollouts.shown},
            "channels": lambda _: {"channels": self.history.channels(self.site)},
        }
        if path not in answers:
            raise NotFound(f"no such address: /api/v1/{path[:80]}; known: live, {', '.join(answers)}")
        return answers[path](parameters)

    def rows(self, path: str, parameters: Parameters) -> Rows:
        """Return the answer as rows without nested values. Raises NotFound, ConfigInvalid or StoreFailed."""
        if path == "latency":
            return self.history.rows(Period.parse(parameters), self._where(parameters))
        if path == "breakdown":
            comparison = self.breakdown({**parameters, "limit": str(GROUPS_MAX)})
            return [{"model": model["model"], **group} for model in comparison["models"] for group in model["groups"]]
        if path == "stages":
            return list(_stage_rows(self.stages(parameters)))
        if path == "query":
            return list(self.query(parameters)["groups"])
        if path == "events":
            events = self.history.events(Period.parse(parameters), self._events_where(parameters), EVENTS_EXPORTED_MAX)[
                "events"
            ]
            return [{"time": time_text(event["at_ms"]), **event} for event in events]
        if path == "devices":
            return [row for view in self._matching(parameters) for row in _device_rows(view)]
        if path == "rollouts":
            return [
                _flat({"time": time_text(rollout["started_ms"]), **rollout})
                for rollout in self.live_views.rollouts.shown
            ]
        if path == "channels":
            return [_flat(channel) for channel in self.history.channels(self.site)]
        raise ConfigInvalid(f"/api/v1/{path[:80]} has no rows: omit format=csv")

    def latency(self, parameters: Parameters) -> dict[str, Any]:
        """Return the curves and heat-map of each model and version."""
        curves = self.history.curves(Period.parse(parameters), self._where(parameters))
        numbers = {curve["model"]: self.live_views.fleet.numbers(curve["model"]) for curve in curves["models"]}
        return {**curves, "numbers": numbers, "newest_ms": self.history.newest_ms()}

    def breakdown(self, parameters: Parameters) -> dict[str, Any]:
        """Return the groups of each model, the slowest group first, at most `limit` for each model.

        Without `by`, the groups are devices; in a large fleet, they are sites.
        """
        limit = _number(parameters, "limit", GROUPS_DEFAULT, GROUPS_MAX)
        lines = self.live_views.fleet.count_models(self.filter(parameters))
        by = parameters.get("by") or ("device" if lines <= COMPARED_MAX else "site")
        comparison = self.history.breakdown(Period.parse(parameters), by, self._where(parameters), lines)
        models = [
            {**model, "groups_count": len(model["groups"]), "groups": model["groups"][:limit]}
            for model in comparison["models"]
        ]
        return {**comparison, "models": models}

    def stages(self, parameters: Parameters) -> dict[str, Any]:
        """Return the times of each model's stages, over time and by version."""
        return self.history.stages(Period.parse(parameters), self._where(parameters))

    def query(self, parameters: Parameters) -> dict[str, Any]:
        """Return the JSON of `edgert fleet query`."""
        since_ms, until_ms = Period.parse(parameters).bounds_ms(self.live_views.wall_ms())
        step_s = duration_s(parameters.get("step", "0"))
        if step_s % 60:
            raise ConfigInvalid(
                f"step={parameters['step'][:20]!r} is not a number of whole minutes: give 1m, 15m or 1h"
            )
        by = dimensions_of(parameters.get("by", "model,version"))
        stages, buckets = (parameters.get(name, "") not in ("", "0") for name in ("stages", "buckets"))
        question = Question(since_ms, until_ms, by, self._where(parameters), int(step_s) // 60, stages)
        shares = shares_of(parameters.get("percentiles", PERCENTILES_DEFAULT))
        lines = self.live_views.fleet.count_models(self.filter(parameters))
        return self.history.run(QueryRequest(question, shares, buckets), lines)

    def events(self, parameters: Parameters) -> dict[str, Any]:
        """Return the newest events, and how many of each type there are."""
        return self.history.events(Period.parse(parameters), self._events_where(parameters), EVENTS_MAX)

    def devices(self, parameters: Parameters) -> dict[str, Any]:
        """Return a page of devices.

        The parameter `state` is one of STATES, `attention` (all but online) or "". `q` is a part of a name.
        """
        matching = self._matching(parameters)
        pages = max(1, -(-len(matching) // A_PAGE))
        page = _number(parameters, "page", 1, pages)
        rows = [_row(view) for view in matching[(page - 1) * A_PAGE : page * A_PAGE]]
        return {"total": len(matching), "page": page, "pages": pages, "devices": rows}

    def device(self, parameters: Parameters) -> dict[str, Any]:
        site, device = parameters.get("site", ""), parameters.get("device", "")
        if not site or not device:
            raise ConfigInvalid("give both `site` and `device`")
        view = self.live_views.fleet.view_of(site, device, self.live_views.clock())
        if view is None:
            raise NotFound(f"no device {site[:64]}/{device[:64]} is known here: see /api/v1/devices")
        fields = {name: dict(view.device.fields.get(name, {})) for name in ("info", "sys", "deploy")}
        return {**_row(view), "late_s": round(view.device.late_s), "window_s": view.device.window_s, **fields}

    def _matching(self, parameters: Parameters) -> list[DeviceView]:
        state, sort = parameters.get("state", ""), parameters.get("sort", "state")
        part = parameters.get("q", "")[:SEARCH_CHARS_MAX].lower()
        if state not in ("", "attention", *STATES):
            raise ConfigInvalid(f"state={state[:20]!r} is not a state; known: attention, {', '.join(STATES)}")
        if sort not in SORTS:
            raise ConfigInvalid(f"sort={sort[:20]!r} is unknown; known: {', '.join(SORTS)}")
        states = ATTENTION if state == "attention" else (state,) if state else STATES
        matching = [
            view
            for view in self.live_views.fleet.views(self.filter(parameters), self.live_views.clock())
            if view.state in states and part in f"{view.device.site}/{view.device.device}".lower()
        ]
        return sorted(matching, key=SORTS[sort])

    def _where(self, parameters: Parameters) -> dict[str, str]:
        device = _name(parameters, "device")
        return {**self.filter(parameters).where(), **({"device": device} if device else {})}

    def _events_where(self, parameters: Parameters) -> dict[str, str]:
        event = _name(parameters, "event")
        return {**self._where(parameters), **({"event": event} if event else {})}


def _name(parameters: Parameters, key: str) -> str:
    word = parameters.get(key, "")
    if word and (len(word) > ID_CHARS_MAX or not ID.match(word)):
        raise ConfigInvalid(f"{key}={word[:80]!r} is not a valid name")
    return word


def _number(parameters: Parameters, key: str, default: int, most: int) -> int:
    text = parameters.get(key, "")
    if not text:
        return default
    if not text.isdecimal() or not text.isascii() or len(text) > 8 or int(text) < 1:
        raise ConfigInvalid(f"{key}={text[:20]!r} is not a whole number of 1 or more")
    return min(int(text), most)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, (list, dict))}


def _stage_rows(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for model in answer["models"]:
        for stage in model["stages"]:
            for step, (p50_ms, p99_ms) in enumerate(zip(stage["p50"], stage["p99"], strict=True)):
                if p99_ms is not None:
                    begin = time_text(answer["since_ms"] + step * answer["step_ms"])
                    yield {"begin": begin, "model": model["model"], "stage": stage["stage"], "p50_ms": p50_ms, "p99_ms": p99_ms}  # fmt: skip


def _device_rows(view: DeviceView) -> Iterator[dict[str, Any]]:
    """Yield a row for each model of a device. A device without models has one row."""
    row = _flat(_row(view))
    for model in _models(view.device) or [{}]:
        yield {**row, **_flat(model), "alarms": " ".join(model.get("alarms", view.alarms))}


def _row(view: DeviceView) -> dict[str, Any]:
    device = view.device
    return {
        "site": device.site,
        "device": device.device,
        "profile": device.profile,
        "state": view.state,
        "why": view.why,
        "since_ms": view.since_ms,
        "alarms": list(view.alarms),
        "models": _models(device),
    }


def _models(device: DeviceState) -> list[dict[str, Any]]:
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
            "alarms": list(device.alarms.get(model, ())),
        }
        for model, line in sorted(device.models.items())
        if line.version
    ]
