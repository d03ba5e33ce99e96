"""The reporter: a worker's thread that turns the span counter's windows into spooled messages.

Once per window the reporter appends `metrics` and `hist`. Between windows the reporter sleeps, so that an idle device
does not wake up. If the spool fails, the messages of a window are lost, but no request fails. The reporter logs the
failure once, and tries again with the next window.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgert import machine
from edgert.errors import EdgeRTError
from edgert.names import checked_id
from edgert.telemetry import messages
from edgert.telemetry.alarms import Alarms, Readings
from edgert.telemetry.messages import Scalar, Topics
from edgert.telemetry.spans import WindowReport
from edgert.telemetry.spool import Spool

if TYPE_CHECKING:  # the daemon imports this module for its events, without NumPy
    from edgert.telemetry.span_counter import SpanCounter

WINDOW_S = 60.0
STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ReporterSettings:
    """The topics of a model's reports, and the length of a window."""

    topics: Topics
    boot: str
    model_version: str
    window_s: float = WINDOW_S

    def __post_init__(self) -> None:
        checked_id("boot", self.boot)
        checked_id("model_version", self.model_version)


class Reporter:
    """Reports one model's span counter to the spool.

    Tests pass their own clocks and call `tick` themselves. `facts` returns further fields of `metrics`. `window_ended`
    is called before each report.
    """

    def __init__(
        self,
        counter: SpanCounter,
        spool: Spool,
        settings: ReporterSettings,
        *,
        alarms: Alarms | None = None,
        facts: Callable[[], Mapping[str, object]] = lambda: machine_facts(),
        window_ended: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.alarms: tuple[str, ...] = ()  # the names of the raised alarms
        self.alarms_changed: Callable[[], object] = lambda: None
        self._alarms = alarms or Alarms({})
        self._readings = Readings()
        self._counter = counter
        self._spool = spool
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._facts = facts
        self._window_ended = window_ended
        self._log = log
        self._refused = False
        self._window_ends_at = clock() + settings.window_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and report the rest of the window, marked `up: 0`."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        self._report(self._counter.end_window(), up=False)

    def tick(self) -> bool:
        """Report the window if it is over; return whether it was over."""
        if self._clock() < self._window_ends_at:
            return False
        self._window_ended()
        self._report(self._counter.end_window(), up=True)
        # The next window ends a full window from now, not after the planned end: missed windows of a suspend are not
        # reported.
        self._window_ends_at = self._clock() + self._settings.window_s
        return True

    def event(self, name: str, **fields: Scalar | None) -> None:
        """Report that something happened to this model."""
        self._guarded(
            lambda: append_event(
                self._spool,
                self._settings.topics,
                name,
                boot=self._settings.boot,
                ts_ms=self._ts_ms(),
                model=self._counter.model,
                model_version=self._settings.model_version,
                **fields,
            )
        )

    def _run(self) -> None:
        while not self._stopping.wait(self.pause_s()):
            self.tick()

    def pause_s(self) -> float:
        """Return the time until the next report is due."""
        return max(0.0, self._window_ends_at - self._clock())

    def _report(self, report: WindowReport, *, up: bool) -> None:
        facts = dict(self._facts())
        for change in self._alarms.judge(self._readings.of(report, facts)):
            self._log(f"{report.model}: {change.event} " + " ".join(f"{k}={v}" for k, v in change.fields().items()))
            self.event(change.event, **change.fields())
        raised = {f"alarm_{name}": round(value, 4) for name, value in self._alarms.raised.items()}
        names = (*self._alarms.raised, *(("shadow",) if facts.get("shadow_alarm") else ()))
        self._guarded(lambda: self._append(report, up, {**facts, **raised, "alarms": len(names)}))
        if names != self.alarms:
            self.alarms = names
            self.alarms_changed()

    def _append(self, report: WindowReport, up: bool, facts: Mapping[str, object]) -> None:
        model, ts_ms = report.model, self._ts_ms()
        metrics = messages.metrics_fields(report, up=up, model_version=self._settings.model_version, facts=facts)
        hist = messages.hist_fields(
            report, model_version=self._settings.model_version, clock_synced=facts.get("clock_synced")
        )

        def keep(kind: str, topic: str, fields: Mapping[str, object]) -> None:
            def numbered(seq: int) -> dict[str, object]:
                return {**messages.envelope(ts_ms=ts_ms, boot=self._settings.boot, seq=seq), **fields}

            self._spool.append(f"{kind}/{model}", topic, numbered, messages.QOS[kind], kind)

        keep("hist", self._settings.topics.hist(model), hist)
        keep("metrics", self._settings.topics.metrics(model), metrics)

    def _guarded(self, append: Callable[[], object]) -> None:
        """Run `append`; log when the spool starts to fail and when it works again."""
        try:
            append()
        except EdgeRTError as error:
            if not self._refused:
                self._log(f"telemetry: not recorded until the spool works again: {error.message}")
            self._refused = True
            return
        if self._refused:
            self._log("telemetry: recording again")
        self._refused = False

    def _ts_ms(self) -> int:
        return int(self._wall_clock() * 1000)


def append_event(
    spool: Spool, topics: Topics, name: str, *, boot: str, ts_ms: int, model: str | None = None, **fields: Scalar | None
) -> int:
    """Spool an `event` message with the event `name`, about `model` or the device. Raises StorageFailed."""
    values = {"event": name, "model": model, "clock_synced": machine.clock_synced(), **fields}
    return spool.append(
        "event",
        topics.event,
        lambda seq: messages.envelope(ts_ms=ts_ms, boot=boot, seq=seq) | values,
        messages.QOS["event"],
        "event",
    )


def machine_facts() -> dict[str, object]:
    """Return the fields about the machine and this process in every `metrics` message."""
    return {
        "clock_synced": machine.clock_synced(),
        "rss_bytes": machine.rss_bytes(),
        "temp_c": machine.temp_c(),
        "throttled": machine.throttled(),
    }
