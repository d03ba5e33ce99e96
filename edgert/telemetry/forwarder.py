"""The forwarder, which empties the spool to a broker: `python -m edgert.telemetry.forwarder --config FILE`.

It is a process of its own, so that neither the serving workers nor the supervisor carry paho, TLS or
a slow network. FILE is JSON:

    {"site": "plant-a", "device": "pi-07", "boot": "b3f9c2", "spool": "/var/lib/edgert/spool/telemetry.db",
     "info": {"edgert_version": "0.1.0", "profile": "raspberry-pi-5"}, "sys_interval_s": 60,
     "mqtt": {"host": "broker.example", "port": 8883, "tls": true, "ca": "/etc/edgert/ca.pem",
              "username": "pi-07", "password_file": "/etc/edgert/mqtt.pw", "protocol": "auto"}}

It stops within 2 s of SIGTERM or SIGINT, and when its parent has died. Exit status: 0, or that of
the error in the configuration (a broker that is down is none).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert import machine as host
from edgert.errors import ConfigInvalid, EdgeRTError, StorageFailed
from edgert.log import log
from edgert.names import checked_id
from edgert.telemetry import messages
from edgert.telemetry.home_assistant import discovery
from edgert.telemetry.link import write_link
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import IN_FLIGHT_MAX, KEEPALIVE_S, BrokerUnreachable, Connection, MqttSettings, Will
from edgert.telemetry.sketch import SCALE
from edgert.telemetry.spool import Spool
from edgert.telemetry.waiting import FolderWatch, Stop

RATE_PER_S = 200.0
BURST_MAX = 50
ACK_TIMEOUT_S = 60.0
REFUSED_RETRY_S = 300.0
IDLE_S_MAX = KEEPALIVE_S / 3  # so that the broker is pinged in time; and where a changed file wakes nobody
RETRY_MIN_S = 1.0
RETRY_MAX_S = 60.0
STABLE_AFTER_S = 10.0
# When a broker has certainly given up a connection that was cut (1.5 keepalives, MQTT 3.1.2.10) and said `lost`. It does so
# late where that connection bore another client id: an older version's.
ONLINE_AGAIN_S = 2 * KEEPALIVE_S
DRAIN_ON_STOP_S = 0.7
GOODBYE_S = 0.4
PARENT_POLL_S = 1.0  # where the kernel has no pidfd (before 5.3)
STOP_LIMIT_S = 1.8
SYS_INTERVAL_S = 60.0
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class Forwarder:
    """Moves one device's reports from the spool to the broker, and keeps its `status` true.

    A broker that is down is no error: `run` tries again until told to stop, with a jittered, growing
    pause, and logs once per change. `clock` is monotonic seconds, `wall_clock` seconds since 1970.
    """

    def __init__(
        self,
        settings: MqttSettings,
        topics: Topics,
        spool: Spool,
        *,
        boot: str,
        info: Mapping[str, object],
        sys_fields: Callable[[], Mapping[str, object]] = dict,
        sys_interval_s: float = 60.0,
        home_assistant: str = "",
        rate_per_s: float = RATE_PER_S,
        retry_min_s: float = RETRY_MIN_S,
        retry_max_s: float = RETRY_MAX_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._topics = topics
        self._spool = spool
        self._boot = checked_id("boot", boot)
        self._info = dict(info)
        self._sys_fields = sys_fields
        self._sys_interval_s, self._home_assistant = sys_interval_s, home_assistant
        self._rate_per_s = rate_per_s
        self._retry_min_s, self._retry_max_s = retry_min_s, retry_max_s
        self._clock, self._wall_clock, self._jitter = clock, wall_clock, jitter
        self._log = log
        self._address = settings.address
        self._state = ""
        self._written = FolderWatch(spool.path.parent)
        self._connection = Connection(
            settings,
            topics.client_id,
            will=Will(topics.status, b"lost"),
            on_acknowledged=self._acknowledged,
        )
        self._begin_anew()

    def run(self, stop: Stop) -> None:
        """Forward until `stop` is set; then returns within DRAIN_ON_STOP_S + GOODBYE_S unless connecting.

        It sleeps until something is due, the broker says something or the spool was written to.
        """
        failures = 0
        while not stop.is_set():
            began_at = self._clock()
            try:
                self._connection.open()
                self._announce()
                self._forward_until(stop)
                self._say_goodbye()
            except EdgeRTError as error:
                self._connection.abandon()
                self._say(error.code, f"telemetry: {error.message}; reports are kept on disk meanwhile")
                # Two devices of one id throw each other out at once: that must slow down as well.
                failures = 0 if self._clock() - began_at > STABLE_AFTER_S else failures + 1
                select.select([stop], [], [], self._retry_delay_s(failures))
        self._written.close()

    def _begin_anew(self) -> None:
        """Forget what the last connection had under way; the spool still has it."""
        self._last_id = 0
        self._retained_version = 0
        self._file = self._spool.file
        self._in_flight: dict[int, int] = {}
        self._arrived: list[int] = []
        self._refused_at: float | None = None
        self._progress_at = self._refilled_at = self._clock()
        self._tokens = float(BURST_MAX)
        self._sys_due_at = self._clock()
        self._online_again_at: float | None = None

    def _announce(self) -> None:
        self._begin_anew()
        self._connection.publish(self._topics.info, self._payload(self._info), 1, retain=True)
        self._connection.publish(self._topics.status, b"online", 1, retain=True)
        self._online_again_at = self._clock() + ONLINE_AGAIN_S

    def _forward_until(self, stop: Stop) -> None:
        while not stop.is_set():
            self._written.forget()
            waiting = self._step()
            pause_s = 1 / self._rate_per_s if waiting else self._idle_s()
            self._connection.pump(pause_s, (stop.fileno(), *self._written.descriptors))
        gives_up_at = self._clock() + DRAIN_ON_STOP_S
        while self._clock() < gives_up_at and (self._step() or self._in_flight):
            self._connection.pump(0.02)

    def _step(self) -> bool:
        """Send what may be sent now; says whether more waits for nothing but the rate.

        A disk that refuses does not end the connection: the device is not lost, its spool is.
        """
        try:
            waiting = self._send_due()
        except StorageFailed as error:
            self._say(error.code, f"telemetry: {error.message}")
            return False
        self._say("connected", f"telemetry: connected to {self._address} (MQTT {self._connection.protocol})")
        return waiting

    def _send_due(self) -> bool:
        self._forget_arrived()
        now = self._clock()
        if now >= self._sys_due_at:
            self._sys_due_at = now + self._sys_interval_s
            self._connection.publish(self._topics.sys, self._payload(self._sys_now()), 0)
        if self._online_again_at is not None and now >= self._online_again_at:
            self._online_again_at = None
            self._connection.publish(self._topics.status, b"online", 1, retain=True)
        last_words = self._spool.retained(self._retained_version)
        if self._spool.file != self._file:
            self._file, self._last_id, self._retained_version = self._spool.file, 0, 0
            last_words = self._spool.retained()
        for last_word in last_words:
            self._connection.publish(last_word.topic, last_word.payload, 1, retain=True)
            self._retained_version = last_word.version
            if last_word.topic == self._topics.deploy and self._home_assistant:
                models = messages.models_of(last_word.payload)
                self._connection.publish(
                    *discovery(self._topics, self._home_assistant, models, self._info, self._sys_interval_s),
                    1,
                    retain=True,
                )
        if self._in_flight and now - self._progress_at > ACK_TIMEOUT_S:
            raise BrokerUnreachable(f"the broker {self._address} has acknowledged nothing for {ACK_TIMEOUT_S:.0f} s")
        if self._refused_at is not None and now - self._refused_at > REFUSED_RETRY_S:
            self._refused_at, self._last_id = None, 0
        return self._send(now)

    def _send(self, now: float) -> bool:
        self._tokens = min(BURST_MAX, self._tokens + (now - self._refilled_at) * self._rate_per_s)
        self._refilled_at = now
        room = IN_FLIGHT_MAX - len(self._in_flight)
        allowed = min(room, int(self._tokens))
        if allowed < 1:
            return room > 0
        under_way = set(self._in_flight.values())
        batch = self._spool.take(allowed, self._last_id)
        for message in batch:
            self._last_id = message.id
            if message.id in under_way:
                continue
            self._tokens -= 1
            number = self._connection.publish(message.topic, message.payload, message.qos)
            if number is None:
                self._arrived.append(message.id)
            else:
                if not self._in_flight:
                    self._progress_at = now
                self._in_flight[number] = message.id
        return len(batch) == allowed < room

    def _acknowledged(self, number: int, refused_because: str | None) -> None:
        message_id = self._in_flight.pop(number, None)
        self._progress_at = self._clock()
        if refused_because is None:
            if message_id is not None:  # status, info, sys and the like are not in the spool
                self._arrived.append(message_id)
        elif self._refused_at is None:
            self._refused_at = self._clock()
            self._log(
                f"telemetry: the broker {self._address} refuses messages ({refused_because}); kept on disk, "
                f"tried again in {REFUSED_RETRY_S:.0f} s; let this user write (an access list: docs/telemetry.md)"
            )

    def _forget_arrived(self) -> None:
        if self._arrived:
            self._spool.done(self._arrived)
            self._arrived = []

    def _say_goodbye(self) -> None:
        number = self._connection.publish(self._topics.status, b"offline", 1, retain=True)
        if number is not None:
            self._in_flight[number] = 0  # no row has id 0
        gives_up_at = self._clock() + GOODBYE_S
        while number in self._in_flight and self._clock() < gives_up_at:
            self._connection.pump(0.05)
        self._connection.close()
        self._say("stopped", "telemetry: stopped")

    def _sys_now(self) -> dict[str, object]:
        stats = self._spool.stats()
        lost = {f"spool_lost_{kind}_total": count for kind, count in sorted(stats.lost.items())}
        waiting = {"spool_rows": stats.rows, "spool_bytes": stats.size_bytes, "spool_lost_total": stats.lost_total}
        return {**self._sys_fields(), **waiting, **lost}

    def _payload(self, said: Mapping[str, object]) -> bytes:
        return messages.dump({**messages.envelope(ts_ms=int(self._wall_clock() * 1000), boot=self._boot), **said})

    def _retry_delay_s(self, failures: int) -> float:
        """Doubles up to the limit; half of it is drawn, so that a fleet does not return in one wave."""
        longest = min(self._retry_max_s, self._retry_min_s * 2.0 ** min(failures, 30))
        return longest * (0.5 + 0.5 * self._jitter())

    def _idle_s(self) -> float:
        """How long nothing is due, unless the broker or the spool has something."""
        return max(0.0, min(IDLE_S_MAX, self._sys_due_at - self._clock()))

    def _say(self, state: str, line: str) -> None:
        if state != self._state:
            self._state = state
            write_link(self._spool.path.parent, state, line.removeprefix("telemetry: "))
            self._log(line)


# --- the process ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwarderConfig:
    """The configuration file, checked."""

    topics: Topics
    boot: str
    spool: Path
    info: dict[str, Any]
    mqtt: MqttSettings
    sys_interval_s: float = SYS_INTERVAL_S
    home_assistant: str = ""

    @classmethod
    def read(cls, path: Path) -> ForwarderConfig:
        """Raises ConfigInvalid."""
        try:
            value = json.loads(path.read_text())
            info, mqtt = dict(value.get("info", {})), dict(value["mqtt"])
            if any(not isinstance(entry, (str, int, float)) for entry in info.values()):
                raise ConfigInvalid(f"{path}: info holds something nested; MQTT payloads are flat")
            return cls(
                topics=Topics(str(value["site"]), str(value["device"])),
                boot=checked_id("boot", str(value["boot"])),
                spool=Path(value["spool"]),
                info=info,
                mqtt=MqttSettings.from_json(mqtt),
                sys_interval_s=float(value.get("sys_interval_s", SYS_INTERVAL_S)),
                home_assistant=str(value.get("home_assistant", "")),
            )
        except OSError as error:
            raise ConfigInvalid(f"{path} cannot be read: {error}") from error
        except KeyError as error:
            raise ConfigInvalid(f"{path} has no {error}; site, device, boot, spool and mqtt are needed") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigInvalid(f"{path} is not a forwarder's configuration: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edgert.telemetry.forwarder", description="Empty the spool to a broker.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    stop = stop_with_parent_or_signal()
    try:
        config = ForwarderConfig.read(parser.parse_args(argv).config)
        forward(config, stop)
    except EdgeRTError as error:
        log(f"telemetry: {error.message}")
        return error.exit_code
    return 0


def forward(config: ForwarderConfig, stop: Stop) -> None:
    """Forward until `stop` is set. Raises StorageFailed where the spool cannot be opened."""
    spool = Spool(config.spool, log=log)
    # Units and scale, so that a subscriber need not guess what the numbers of this device mean.
    told = {"lat_unit": "ms", "sketch_scale": SCALE, **config.info}
    Forwarder(
        config.mqtt,
        config.topics,
        spool,
        boot=config.boot,
        info=told,
        sys_fields=lambda: host.sys_fields(config.spool.parent),
        sys_interval_s=config.sys_interval_s,
        home_assistant=config.home_assistant,
        log=log,
    ).run(stop)
    spool.close()


def stop_with_parent_or_signal() -> Stop:
    """Watch for a stop signal and for the parent's death, either of which sets the `Stop` that is returned.

    Threads of their own wait for them, as a name look-up may block the main thread for many
    seconds without letting a handler run; STOP_LIMIT_S later the process ends.
    PR_SET_PDEATHSIG would not do: it fires when the parent's *thread* that forked ends.
    """
    stop, parent = Stop(), os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    def end() -> None:
        stop.set()
        # Nothing is lost by leaving abruptly: what was not acknowledged lies in the spool.
        limit = threading.Timer(STOP_LIMIT_S, os._exit, (0,))
        limit.daemon = True
        limit.start()

    def heed_signals() -> None:
        signal.sigwait(_STOP_SIGNALS)
        end()

    def outlive_no_parent() -> None:
        _wait_for_end(parent)
        end()

    for watch in (heed_signals, outlive_no_parent):
        threading.Thread(target=watch, name=watch.__name__, daemon=True).start()
    return stop


def _wait_for_end(parent: int) -> None:
    """Return when the process `parent`, our parent, has ended."""
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        return
    if os.getppid() == parent:  # else it ended before, and the number may be another's by now
        select.select([descriptor], [], [])


if __name__ == "__main__":
    sys.exit(main())
