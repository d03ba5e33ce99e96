"""`edgert fleet export`: the exporter from MQTT to Prometheus and OpenTelemetry."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from urllib.parse import unquote

import click

from edgert.cli.output import progress
from edgert.errors import ConfigInvalid
from edgert.telemetry.mqtt import MqttSettings
from edgert_deploy.cli.shared.broker_options import broker_options, named_session, session_option
from edgert_deploy.cli.shared.option_groups import SectionedCommand
from edgert_deploy.cli.shared.options import for_option, listen_option_of
from edgert_deploy.cli.shared.stopping import stopping
from edgert_deploy.fleet.export import otlp
from edgert_deploy.fleet.export.exporter import BY_DEFAULT, Exporter
from edgert_deploy.fleet.export.post import PushFailed, http_address
from edgert_deploy.fleet.export.prometheus import Exposition
from edgert_deploy.fleet.export.remote_write import WAITING_MAX, RemoteWriter
from edgert_deploy.fleet.export.scrape import scrape_server
from edgert_deploy.fleet.reports import dimensions_of
from edgert_deploy.fleet.subscriber import FleetSubscriber

PORT = 9464
OTLP_EVERY_S = 60.0
POLL_S = 0.25
WRITE_EVERY_S = 1.0
WRITE_PATH = "/api/v1/write"


@click.command(cls=SectionedCommand)
@broker_options
@listen_option_of("/metrics", PORT)
@click.option(
    "--by", default=",".join(BY_DEFAULT), show_default=True, metavar="WORDS", help="The labels of the series."
)
@session_option
@click.option(
    "--otlp",
    "otlp_url",
    metavar="URL",
    help="Also push to this OTLP endpoint each minute (HTTP, protobuf), with $OTEL_EXPORTER_OTLP_HEADERS (name=value,...).",
)
@click.option(
    "--remote-write",
    "write_url",
    metavar="URL",
    help="Also write each report at its own time to Prometheus (http://HOST:9090, remote write 1.0).",
)
@for_option
def export(
    settings: MqttSettings,
    site: str | None,
    listen: tuple[str, int],
    by: str,
    session_name: str | None,
    otlp_url: str | None,
    write_url: str | None,
    for_s: float | None,
) -> None:
    """Serve the fleet's latency to Prometheus as native histograms; push the latency as OTLP.

    Prometheus 2.40 or newer needs --enable-feature=native-histograms to read the histograms as native histograms. A
    scraper that requests text gets classic histograms with one bucket for each octave. Several exporters divide a large
    fleet by --site; sum over all exporters.

    An exporter keeps nothing on disk: after a restart it counts from 0, as rate() expects. While it does not run, it
    misses messages, unless --session NAME makes the broker keep them (one NAME for each exporter).

    The exit code is 4 if an option cannot be used or the broker refuses the login, and 6 if the broker cannot be
    reached.

    \b
    Examples:
      edgert fleet export --broker broker.local
      edgert fleet export --broker broker.local --listen 0.0.0.0:9464 --by site,device,model,version
      edgert fleet export --broker broker.local --site plant-a --listen 127.0.0.1:9465   # one for each site
      edgert fleet export --broker broker.local --session main   # the broker keeps messages while the exporter is down
      edgert fleet export --broker broker.local --otlp http://collector:4318
      edgert fleet export --broker broker.local --remote-write http://prometheus:9090

    \b
    The p99 of each model and version, in Prometheus:
      histogram_quantile(0.99, sum by (model, version) (rate(edgert_latency_milliseconds[5m])))
    """
    otlp_to = otlp.endpoint(otlp_url) if otlp_url else None
    headers = otlp_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    client_id, session_s = named_session("export", session_name)
    name = session_name or f"b{secrets.token_hex(6)}"
    exporter = Exporter(name, dimensions_of(by), wall_clock=time.time)
    listeners, pushes = [exporter], list[_Pushes]()
    if otlp_to:
        consequence = "the next push contains everything"
        pushes.append(_Pushes(lambda: otlp.push(otlp_to, exporter, time.time(), headers), OTLP_EVERY_S, consequence))
    if write_url:
        address = http_address("--remote-write", write_url, WRITE_PATH, "http://HOST:9090")
        writer = RemoteWriter(address, wall_clock=time.time)
        listeners.append(writer)
        consequence = f"up to {WAITING_MAX} points wait for the next push; points that the server refuses are dropped"
        pushes.append(_Pushes(writer.flush, WRITE_EVERY_S, consequence))
    subscriber = FleetSubscriber(
        settings,
        listeners,
        site,
        client_id=client_id,
        session_s=session_s,
        handled=lambda: exporter.applied,
        log=_print_status,
    )
    server = scrape_server(Exposition(exporter), *listen)
    try:
        subscriber.open()
        _print_status(f"exporting {settings.address}; Prometheus reads port {server.port}, path /metrics")
        stop = stopping(for_s)
        while not stop():
            subscriber.listen(POLL_S)
            for each in pushes:
                each.when_due()
        for each in pushes:
            each.now()
    finally:
        subscriber.close()
        server.close()


class _Pushes:
    """Calls `push` every `every_s`; prints a line when pushes start to fail, and when they work again.

    The line about a failure ends with the `consequence` of the failure.
    """

    def __init__(self, push: Callable[[], None], every_s: float, consequence: str) -> None:
        self._push = push
        self._every_s = every_s
        self._consequence = consequence
        self._at = time.monotonic()
        self._failure = ""

    def when_due(self) -> None:
        if time.monotonic() - self._at >= self._every_s:
            self.now()

    def now(self) -> None:
        self._at, before = time.monotonic(), self._failure
        try:
            self._push()
            self._failure = ""
        except PushFailed as error:
            self._failure = error.message
        if self._failure and self._failure != before:
            _print_status(f"{self._failure}; {self._consequence}")
        elif before and not self._failure:
            _print_status("the endpoint accepts metrics again")


def otlp_headers(text: str) -> dict[str, str]:
    """Read `name=value,name=value`, percent-encoded as OpenTelemetry defines it. Raises ConfigInvalid."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if any(not name.strip() or not equals for name, equals, _ in pairs):
        raise ConfigInvalid("$OTEL_EXPORTER_OTLP_HEADERS cannot be read: give NAME=VALUE,NAME=VALUE")
    return {unquote(name).strip(): unquote(value).strip() for name, _, value in pairs}


def _print_status(line: str) -> None:
    progress(f"export: {line}")
