"""Live updates for pages: first the whole fleet, then the changes, at most once a second.

Theory of operation: `tick` runs about once a second and wakes the stream of every page. Each stream compares the fleet
under its filter with the last view that it sent. Pages with the same filter share the work.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edgert_deploy.fleet.ui.fleet_state import LETTERS, STATES, Filter, FleetState, line_fits
from edgert_deploy.fleet.ui.rollouts import Rollouts

FILTERS_A_TICK_MAX = 64


@dataclass(frozen=True)
class View:
    """The fleet under one filter at one moment.

    Attributes:
        at_ms: The time of the view, in ms since 1970.
        sites: For each site, the names of its devices, and a text with one letter for the state of each device.
        counts: The number of devices in each state.
        per_s: Requests a second; None until two reports of a model have arrived.
        words: The possible values of each field of a filter.
        revisions: Numbers that grow when the data of other requests change.
        refused: The number of refused messages.
        last_refusal: The reason why the last of these messages was refused.
        trouble: The reason why the page may be out of date; "" if it is up to date.
    """

    at_ms: int
    sites: dict[str, tuple[tuple[str, ...], str]]
    counts: dict[str, int]
    per_s: float | None
    words: dict[str, list[str]]
    revisions: dict[str, int]
    refused: int
    last_refusal: str
    trouble: str

    def as_json(self) -> dict[str, Any]:
        sites = [
            {"site": site, "devices": names, "states": states} for site, (names, states) in sorted(self.sites.items())
        ]
        return {**self._counts(), "words": self.words, "sites": sites}

    def changes_since(self, before: View) -> dict[str, Any] | None:
        """Return the changes; None if devices were added or removed: then the page needs the whole fleet."""
        if {site: names for site, (names, _) in self.sites.items()} != {
            site: names for site, (names, _) in before.sites.items()
        }:
            return None
        changed = [
            [site, number, letter]
            for site, (_, states) in self.sites.items()
            if states != before.sites[site][1]
            for number, (letter, was) in enumerate(zip(states, before.sites[site][1], strict=True))
            if letter != was
        ]
        return {**self._counts(), **({"words": self.words} if self.words != before.words else {}), "changed": changed}

    def differs_from(self, before: View) -> bool:
        return replace(self, at_ms=0) != replace(before, at_ms=0)

    def _counts(self) -> dict[str, Any]:
        return {
            "at_ms": self.at_ms,
            "counts": self.counts,
            "per_s": self.per_s,
            "revisions": self.revisions,
            "refused": self.refused,
            "last_refusal": self.last_refusal,
            "trouble": self.trouble,
        }


class LiveViews:
    """Gives views to any number of streams. Any thread may call any method, but only one may call `tick`."""

    def __init__(
        self, fleet: FleetState, rollouts: Rollouts, clock: Callable[[], float], wall_ms: Callable[[], int]
    ) -> None:
        self.fleet, self.rollouts = fleet, rollouts
        self.clock, self.wall_ms = clock, wall_ms
        self.trouble = ""
        self._ticked = threading.Condition()
        self._number = 0
        self._closed = False
        self._reports = (0, 0)  # the numbers of reports at the last tick and at the tick before
        self._views: dict[Filter, View] = {}
        self._drawing = threading.Lock()

    def tick(self) -> None:
        """Read the rollouts and wake the streams."""
        self.rollouts.read(self.fleet.device_names())
        with self._ticked:
            self._number += 1
            # The recorder has written the reports of the tick before by now, so pages may query the store for them.
            self._reports = (self.fleet.reports + self.fleet.events, self._reports[0])
            self._views.clear()
            self._ticked.notify_all()

    def close(self) -> None:
        with self._ticked:
            self._closed = True
            self._ticked.notify_all()

    def wait(self, number: int, timeout_s: float) -> int | None:
        """Wait for a tick after `number`; return the number of this tick.

        Return `number` if no tick follows within `timeout_s`, and None after `close`.
        """
        with self._ticked:
            self._ticked.wait_for(lambda: self._closed or self._number > number, timeout_s)
            return None if self._closed else self._number

    def view(self, chosen: Filter) -> View:
        with self._drawing:
            view = self._views.get(chosen)
            if view is None:
                view = self._draw(chosen)
                if len(self._views) < FILTERS_A_TICK_MAX:
                    self._views[chosen] = view
            return view

    def _draw(self, chosen: Filter) -> View:
        wall_ms = self.wall_ms()
        names: dict[str, list[str]] = {}
        letters: dict[str, list[str]] = {}
        counts: Counter[str] = Counter()
        rates: list[float] = []
        for view in self.fleet.views(chosen, self.clock()):
            device = view.device
            names.setdefault(device.site, []).append(device.device)
            letters.setdefault(device.site, []).append(LETTERS[view.state])
            counts[view.state] += 1
            if view.state in ("online", "alarmed", "slow", "behind"):
                lines = [line for model, line in list(device.models.items()) if line_fits(model, line, chosen)]
                rates += [line.per_s for line in lines if line.per_s is not None]
        return View(
            at_ms=wall_ms,
            sites={site: (tuple(names[site]), "".join(letters[site])) for site in names},
            counts={state: counts[state] for state in STATES},
            per_s=round(sum(rates), 2) if rates else None,
            words=self.fleet.filter_values(),
            revisions={"history": self._reports[1], "rollouts": self.rollouts.revision},
            refused=self.fleet.refused,
            last_refusal=self.fleet.last_refusal,
            trouble=self.trouble,
        )
