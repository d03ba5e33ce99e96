"""The fleet as its reports tell it: `FleetState` (pure) and `FleetSubscriber`, which feeds it from a broker.

Theory of operation: each message is applied once. Reports of one stream carry a `seq` that grows by
one, so a repeated message is known by (boot, seq) and a missing one leaves a hole, which a late
arrival fills again. Percentiles come from sketches merged over the last windows: never from other
percentiles, as the mean of devices' p99.9 is not the fleet's.

`status` and `info` are retained and read through a plain subscription: mosquitto before 2.0.13 hands
retained messages to shared subscriptions only some of the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgert.errors import EdgeRTError, ProtocolError
from edgert.names import ID
from edgert.telemetry import messages
from edgert.telemetry.alarms import CLEARED, RAISED
from edgert.telemetry.messages import HistMessage, MetricsMessage, Topic, parse_topic
from edgert.telemetry.mqtt import QUEUED_MAX, BrokerUnreachable, Connection, MqttSettings, Session
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.packed import MERGED, WINDOW, WINDOW_COUNT_MAX, Pool, Scalars, pack

HORIZON_S = 600.0
WINDOWS_MAX = 64
DEVICES_MAX = 10_000
MODELS_PER_DEVICE_MAX = 64
BOOTS_KEPT_MAX = 4
HOLES_MAX = 10_000
# A jump this far is a counter begun anew after a lost spool, not as many lost messages.
SEQ_JUMP_MAX = 2**31
STALE_AFTER_WINDOWS = 2.5
WINDOW_S_DEFAULT = 60.0
RETRY_MIN_S = 0.5
RETRY_MAX_S = 15.0
QUIET_S = 0.02
# What an alarm begins and ends with besides RAISED and CLEARED, which name it as `alarm`: the shadow's own, and those that are one
# themselves, until the model serves anew.
ALARM, ALARM_ENDS = "_alarm", "_recovered"
ALARMING = frozenset(("crashed", "degraded", "no_room", "quarantined", "rolled_back"))
TREND_POINTS = 12
PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


class SeqTracker:
    """Tells new messages of one stream and boot from repeated ones, and counts what never came.

    Counting begins with the first message seen: what was sent before is not held against anyone. `late` of the
    numbers before it are still new should they come, as where several listeners put their parts together.
    """

    __slots__ = ("_before", "_first", "_holes", "_holes_forgotten", "_last", "_late", "restarts")

    def __init__(self, late: int = 0) -> None:
        self.restarts = 0
        self._last: int | None = None
        self._late, self._first, self._before = late, 0, 0
        self._holes: set[int] | None = None  # most streams never have one, and an empty set takes 216 bytes
        self._holes_forgotten = 0

    @property
    def missing(self) -> int:
        return len(self._holes or ()) + self._holes_forgotten

    def is_new(self, seq: int) -> bool:
        """Whether `seq` was not seen before; remembers it."""
        last = self._last
        if last is not None and seq == last + 1:
            self._last = seq
            return True
        if last is None or abs(seq - last) > SEQ_JUMP_MAX:
            self.restarts += last is not None
            self._last = self._first = seq
            self._before = (1 << self._late) - 1  # bit n: the number n + 1 before the first has not come
            return True
        if seq > last:
            self._add_holes(last + 1, seq)
            self._last = seq
            return True
        if self._holes and seq in self._holes:
            self._holes.remove(seq)
            return True
        return self._came_before_the_first(seq)

    def _came_before_the_first(self, seq: int) -> bool:
        bit = 1 << (self._first - seq - 1) if 0 < self._first - seq <= self._late else 0
        new = bool(self._before & bit)
        self._before &= ~bit
        return new

    def _add_holes(self, first: int, end: int) -> None:
        holes = self._holes = self._holes or set()
        room = HOLES_MAX - len(holes)
        self._holes_forgotten += max(0, end - first - room)
        holes.update(range(max(first, end - room), end))


class Window(NamedTuple):
    """One window's latencies, packed: a fleet's last ten minutes are a great many. `heard_at` is monotonic seconds."""

    heard_at: float
    ts_ms: int
    window_s: float
    model_version: str
    scalars: Scalars
    buckets: bytes

    @classmethod
    def of(cls, hist: HistMessage, heard_at: float) -> Window:
        sketch = hist.sketch
        scalars = Scalars(sketch.zero, sketch.count, sketch.sum, sketch.min, sketch.max)
        form = WINDOW if sketch.count <= WINDOW_COUNT_MAX else MERGED
        version = intern(hist.model_version)
        return cls(heard_at, hist.ts_ms, hist.window_s, version, scalars, pack(sketch.buckets, form))

    @property
    def form(self) -> np.dtype[np.void]:
        return WINDOW if self.scalars.count <= WINDOW_COUNT_MAX else MERGED


def pooled(windows: Sequence[Window]) -> Sketch:
    """The sketch of all their requests together."""
    pool = Pool(1)
    for form in (WINDOW, MERGED):
        if blobs := [window.buckets for window in windows if window.form is form]:
            pool.add([0] * len(blobs), blobs, form)
    for window in windows:
        pool.add_scalars(0, window.scalars)
    return pool.sketch(0)


@dataclass
class ModelState:
    """One model on one device: its last windows, and what it says of itself."""

    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=WINDOWS_MAX))
    alarms: set[str] = field(default_factory=set)
    metrics: MetricsMessage | None = None
    duplicates: int = 0
    trackers: dict[tuple[str, str], SeqTracker] = field(default_factory=dict)

    def is_new(self, kind: str, boot: str, seq: int) -> bool:
        tracker = self.trackers.setdefault((kind, boot), SeqTracker())
        while len(self.trackers) > 2 * BOOTS_KEPT_MAX:
            del self.trackers[next(iter(self.trackers))]
        new = tracker.is_new(seq)
        self.duplicates += not new
        return new

    @property
    def missing(self) -> int:
        """Histograms that were sent and never came. `metrics` travel at QoS 0 and are not held against the line."""
        return sum(tracker.missing for (kind, _), tracker in self.trackers.items() if kind == "hist")

    def keep(self, window: Window, horizon_s: float) -> None:
        """Remember it, and forget those that no question will reach again."""
        while self.windows and window.heard_at - self.windows[0].heard_at > horizon_s:
            self.windows.popleft()
        self.windows.append(window)

    def recent(self, now: float, horizon_s: float) -> list[Window]:
        """The windows of the last `horizon_s`, by when they came and by the device's own clock.

        Both, as a device that was cut off delivers hours of windows within seconds.
        """
        newest_ms = max((window.ts_ms for window in self.windows), default=0)
        return [
            window
            for window in self.windows
            if now - window.heard_at <= horizon_s and newest_ms - window.ts_ms <= horizon_s * 1000
        ]

    def note(self, event: str, alarm: str) -> None:
        note_alarm(self.alarms, event, alarm)


@dataclass
class DeviceState:
    """One device. Times are the subscriber's monotonic seconds."""

    site: str
    device: str
    known_since: float
    status: str = "unknown"
    info: dict[str, Any] = field(default_factory=dict)
    sys: dict[str, Any] = field(default_factory=dict)
    heard_at: float | None = None
    window_s: float = WINDOW_S_DEFAULT
    models: dict[str, ModelState] = field(default_factory=dict)
    events: ModelState = field(default_factory=ModelState)  # those of the device, whatever model they concern

    def age_s(self, now: float) -> float | None:
        """How long ago it last said something itself; None where only retained words are known."""
        return None if self.heard_at is None else now - self.heard_at

    def state(self, now: float) -> str:
        """`online`, `offline`, `lost`, or `stale`: said to be online and yet silent for too long."""
        silent_s = now - (self.known_since if self.heard_at is None else self.heard_at)
        if self.status in ("online", "unknown") and silent_s > STALE_AFTER_WINDOWS * self.window_s:
            return "stale"
        return self.status


@dataclass(frozen=True)
class Row:
    """One line of the fleet's table: a model on a device, a device without one, or a model fleet-wide.

    `device` and `site` are None for the fleet's line, `model` is None where a device reports none.
    Rates and percentiles cover the horizon; counters count since the model's worker began.
    """

    site: str | None
    device: str | None
    model: str | None
    state: str
    model_version: str = ""
    devices: int = 1
    rate_per_s: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None
    max_ms: float | None = None
    answered: int = 0
    errors: int = 0
    shed: int = 0
    cache_hit_share: float | None = None
    batch_mean: float | None = None
    missing: int = 0
    duplicates: int = 0
    age_s: float | None = None
    alarms: tuple[str, ...] = ()
    trend_p95_ms: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {name: _rounded(value) for name, value in vars(self).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


class FleetState:
    """What all devices have said. Pure: it is given messages and times, and answers with rows."""

    def __init__(self, horizon_s: float = HORIZON_S) -> None:
        self.devices: dict[tuple[str, str], DeviceState] = {}
        self.refused = 0
        self.last_refusal = ""
        self._horizon_s = horizon_s

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> Topic | None:
        """Take one message in. Returns its topic, or None where it is repeated or not of this contract."""
        try:
            parsed = parse_topic(topic)
            changed = self._apply(parsed, payload, retained, now)
        except ProtocolError as error:
            self.refused += 1
            self.last_refusal = f"{topic}: {error.message}"
            return None
        return parsed if changed else None

    def rows(self, now: float) -> list[Row]:
        """Every device's models, ordered by site and device, then one line per model for the whole fleet."""
        ordered = [self.devices[key] for key in sorted(self.devices)]
        return [row for device in ordered for row in self._device_rows(device, now)] + self.fleet_rows(now)

    def fleet_rows(self, now: float) -> list[Row]:
        names = sorted({name for device in self.devices.values() for name in device.models})
        return [self._fleet_row(name, now) for name in names]

    def latency(self, model: str, now: float) -> Sketch:
        """The latencies of `model` over all devices and the horizon, merged exactly."""
        states = [device.models[model] for device in self.devices.values() if model in device.models]
        return pooled([window for state in states for window in state.recent(now, self._horizon_s)])

    def _apply(self, topic: Topic, payload: bytes, retained: bool, now: float) -> bool:
        device = self._device(topic, now)
        if not retained:
            device.heard_at = now
        if topic.kind == "status":
            device.status = messages.parse_status(payload)
        elif topic.kind == "info":
            device.info = messages.load(payload)
        elif topic.kind == "sys":
            device.sys = messages.load(payload)
        elif topic.kind == "hist":
            return self._apply_hist(device, topic, HistMessage.from_json(payload), now)
        elif topic.kind == "metrics":
            return self._apply_metrics(device, topic, MetricsMessage.from_json(payload))
        elif topic.kind == "event":
            return self._apply_event(device, topic, messages.load(payload))
        return True

    def _apply_hist(self, device: DeviceState, topic: Topic, hist: HistMessage, now: float) -> bool:
        model = _model(device, topic)
        if not model.is_new("hist", hist.boot, hist.seq):
            return False
        model.keep(Window.of(hist, now), self._horizon_s)
        return True

    def _apply_event(self, device: DeviceState, topic: Topic, fields: dict[str, messages.Scalar]) -> bool:
        event, boot, seq = (
            messages.text_of(fields, "event"),
            messages.text_of(fields, "boot"),
            messages.int_of(fields, "seq"),
        )
        if not device.events.is_new("event", boot, seq):
            return False
        about, alarm = fields.get("model"), fields.get("alarm")
        if not isinstance(alarm, str) or not ID.match(alarm):  # it is shown on terminals
            alarm = "unnamed"
        if isinstance(about, str) and ID.match(about):
            _model(device, Topic(topic.site, topic.device, "event", about)).note(event, alarm)
        else:
            device.events.note(event, alarm)
        return True

    def _apply_metrics(self, device: DeviceState, topic: Topic, metrics: MetricsMessage) -> bool:
        model = _model(device, topic)
        if not model.is_new("metrics", metrics.boot, metrics.seq):
            return False
        device.window_s = max(metrics.window_s, 1.0)
        if model.metrics is None or metrics.ts_ms >= model.metrics.ts_ms or metrics.boot != model.metrics.boot:
            model.metrics = metrics
        return True

    def _device(self, topic: Topic, now: float) -> DeviceState:
        key = (topic.site, topic.device)
        if key not in self.devices:
            if len(self.devices) >= DEVICES_MAX:
                raise ProtocolError(f"more than {DEVICES_MAX} devices; watch one site at a time")
            self.devices[key] = DeviceState(topic.site, topic.device, known_since=now)
        return self.devices[key]

    def _device_rows(self, device: DeviceState, now: float) -> Iterator[Row]:
        if not device.models:
            alarms = tuple(sorted(device.events.alarms))
            yield Row(device.site, device.device, None, device.state(now), age_s=device.age_s(now), alarms=alarms)
        for name, model in sorted(device.models.items()):
            yield self._model_row(device, name, model, now)

    def _model_row(self, device: DeviceState, name: str, model: ModelState, now: float) -> Row:
        recent = model.recent(now, self._horizon_s)
        metrics = model.metrics
        version = metrics.model_version if metrics else recent[-1].model_version if recent else ""
        return Row(
            device.site,
            device.device,
            name,
            device.state(now),
            model_version=version,
            **_latency_fields(recent),
            **_counter_fields([metrics] if metrics else []),
            missing=model.missing,
            duplicates=model.duplicates,
            age_s=device.age_s(now),
            alarms=tuple(sorted(model.alarms | device.events.alarms)),
            trend_p95_ms=_trend(recent),
        )

    def _fleet_row(self, name: str, now: float) -> Row:
        holders = [device for device in self.devices.values() if name in device.models]
        models = [device.models[name] for device in holders]
        windows = [window for model in models for window in model.recent(now, self._horizon_s)]
        fields = _latency_fields(windows)
        rates = [_rate(model.recent(now, self._horizon_s)) for model in models]
        fields["rate_per_s"] = sum(rate for rate in rates if rate is not None) if windows else None
        metrics = [model.metrics for model in models if model.metrics]
        return Row(
            None,
            None,
            name,
            f"{sum(device.state(now) == 'online' for device in holders)}/{len(holders)} online",
            model_version=",".join(sorted({said.model_version for said in metrics})),
            devices=len(holders),
            **fields,
            **_counter_fields(metrics),
            missing=sum(model.missing for model in models),
            duplicates=sum(model.duplicates for model in models),
            alarms=tuple(sorted({alarm for model in models for alarm in model.alarms})),
            trend_p95_ms=_fleet_trend(windows, now),
        )


class Listener(Protocol):
    """What a subscriber feeds."""

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> object: ...


class FleetSubscriber:
    """Feeds a FleetState, a recorder or a bridge from a broker, for as long as it is asked to.

    It hears everything of `site`, or its share of it, and the topic filters `also`. The first connection must
    succeed; one that is lost later is made again, and `log` says so. With a `session` the broker keeps what comes
    meanwhile, and forgets a message once `settled` says that the first so many applied are dealt with.
    """

    def __init__(
        self,
        settings: MqttSettings,
        state: Listener,
        site: str | None = None,
        *,
        client_id: str = "",
        share: str | None = None,
        also: tuple[str, ...] = (),
        session: Session | None = None,
        settled: Callable[[], int] = lambda: 0,
        on_reconnected: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._state = state
        self._filters = (*messages.subscriptions(site, share), *also)
        self._clock, self._sleep, self._log = clock, sleep, log
        self._connection = Connection(
            settings, client_id, session=session, on_message=self._heard, on_acknowledged=self._arrived
        )
        self._settled, self._on_reconnected = settled, on_reconnected
        self._shares_by_mqtt_3 = share is not None
        self._under_way = 0
        self._failures = 0
        self._connected = False

    def open(self) -> None:
        """Connect and subscribe. Raises BrokerUnreachable, BrokerRefused, BrokerTlsFailed or ConfigInvalid."""
        self._under_way = 0
        self._connection.open()
        self._connection.subscribe(self._filters, qos=1)
        self._connected, self._failures = True, 0
        if self._shares_by_mqtt_3 and self._connection.protocol != "5":
            self._shares_by_mqtt_3 = False  # said once
            self._log(
                "the broker speaks MQTT 3.1.1, which knows no shared subscriptions: some brokers (RabbitMQ) grant "
                "them and deliver nothing; then leave --share out, and divide by --site"
            )

    def listen(self, seconds: float) -> None:
        """Apply what arrives within `seconds`, connecting again where the connection is lost.

        It returns early where the broker may hand out no more before something of what came is settled.
        """
        ends_at, began = self._clock() + seconds, self._connection.taken
        while (left := ends_at - self._clock()) > 0:
            try:
                if not self._connected:
                    self.open()
                    self._log("connected again")
                    self._on_reconnected()
                if self._pump(left, began):
                    return
            except EdgeRTError as error:
                self._lost(error)
                self._sleep(max(0.0, min(ends_at - self._clock(), self._retry_delay_s())))

    @property
    def room(self) -> int:
        """How many messages may be published now, until others have arrived."""
        return max(0, QUEUED_MAX - self._under_way) if self._connected else 0

    def publish(self, topic: str, payload: bytes) -> None:
        """Send a message at QoS 1, where there is `room`. One that was lost is told by `on_reconnected`."""
        if self._connected:
            try:
                self._under_way += self._connection.publish(topic, payload, 1) is not None
            except EdgeRTError as error:
                self._lost(error)

    def close(self) -> None:
        if self._connected:
            self._connection.acknowledge(self._settled())
        self._connection.close()

    def _pump(self, left_s: float, began: int) -> bool:
        """Serve the network once; whether something came since `began`, waits to be settled, and no more comes."""
        connection, taken = self._connection, self._connection.taken
        connection.pump(min(left_s, QUIET_S) if connection.unacknowledged else left_s)
        connection.acknowledge(self._settled())
        return connection.unacknowledged > 0 and connection.taken == taken > began

    def _lost(self, error: EdgeRTError) -> None:
        self._connection.abandon()
        if self._connected or not isinstance(error, BrokerUnreachable):
            self._log(f"{error.message}; trying again")
        self._connected = False
        self._failures += 1

    def _retry_delay_s(self) -> float:
        return min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(self._failures, 10))

    def _arrived(self, _message_id: int, _refused_because: str | None) -> None:
        self._under_way -= 1

    def _heard(self, topic: str, payload: bytes, retained: bool) -> None:
        self._state.apply(topic, payload, retained, self._clock())


def note_alarm(alarms: set[str], event: str, alarm: str) -> None:
    """An alarm lasts from its event until the one that ends it; a version that serves anew begins without any."""
    if event == "serving":
        alarms.clear()
    elif event == RAISED:
        alarms.add(alarm)
    elif event == CLEARED:
        alarms.discard(alarm)
    elif event.endswith(ALARM_ENDS):
        alarms.discard(event.removesuffix(ALARM_ENDS))
    elif event.endswith(ALARM) or event in ALARMING:
        alarms.add(event.removesuffix(ALARM))


def _model(device: DeviceState, topic: Topic) -> ModelState:
    assert topic.model is not None
    if topic.model not in device.models and len(device.models) >= MODELS_PER_DEVICE_MAX:
        raise ProtocolError(f"device {device.device} reports more than {MODELS_PER_DEVICE_MAX} models")
    return device.models.setdefault(topic.model, ModelState())


def _latency_fields(windows: list[Window]) -> dict[str, Any]:
    sketch = pooled(windows)
    if not sketch.count:
        return {"rate_per_s": _rate(windows)}
    percentiles = {name: sketch.quantile(q) for name, q in PERCENTILES.items()}
    return {**percentiles, "max_ms": sketch.max, "answered": sketch.count, "rate_per_s": _rate(windows)}


def _rate(windows: list[Window]) -> float | None:
    """Requests answered per second over the windows, which follow one another."""
    seconds = sum(window.window_s for window in windows)
    return sum(window.scalars.count for window in windows) / seconds if seconds > 0 else None


def _trend(windows: list[Window]) -> tuple[float, ...]:
    """p95 of the last windows that held a request, oldest first."""
    last = [window for window in sorted(windows, key=lambda each: each.ts_ms) if window.scalars.count][-TREND_POINTS:]
    return tuple(pooled([window]).quantile(0.95) for window in last)


def _fleet_trend(windows: list[Window], now: float) -> tuple[float, ...]:
    """p95 of all devices' windows by when they were heard, in steps of a window's length."""
    step_s = max((window.window_s for window in windows), default=WINDOW_S_DEFAULT) or WINDOW_S_DEFAULT
    steps: dict[int, list[Window]] = {}
    for window in windows:
        if window.scalars.count:
            steps.setdefault(int((now - window.heard_at) / step_s), []).append(window)
    return tuple(pooled(steps[step]).quantile(0.95) for step in sorted(steps, reverse=True)[-TREND_POINTS:])


def _counter_fields(said: list[MetricsMessage]) -> dict[str, Any]:
    if not said:
        return {}
    requests = sum(metrics.number("req_total") for metrics in said)
    hits = sum(metrics.number("cache_hit_total") for metrics in said)
    batches = [mean for metrics in said if (mean := metrics.number("batch_mean")) > 0]
    return {
        "errors": int(sum(metrics.number("err_total") for metrics in said)),
        "shed": int(sum(metrics.number("shed_total") for metrics in said)),
        "cache_hit_share": hits / requests if requests else None,
        "batch_mean": sum(batches) / len(batches) if batches else None,
    }
