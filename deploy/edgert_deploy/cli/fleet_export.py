"""`edgert fleet export`: the exporter from MQTT to Prometheus and OpenTelemetry."""

from __future__ import annotations

import os
import secrets
import time

import click

from edgert.errors import ConfigInvalid
from edgert.printable import printable
from edgert.telemetry.mqtt import MqttSettings
from edgert_deploy.cli.broker_options import broker_options, named_session, session_option
from edgert_deploy.cli.options import for_option
from edgert_deploy.cli.stopping import stopping
from edgert_deploy.cli.types import Duration
from edgert_deploy.common.broker_address import host_and_port
from edgert_deploy.fleet.export import otlp
from edgert_deploy.fleet.export.exporter import BY_DEFAULT, DIMENSIONS, Exporter
from edgert_deploy.fleet.export.ledger import FLUSH_EVERY_S, Ledger
from edgert_deploy.fleet.export.prometheus import Exposition
from edgert_deploy.fleet.export.scrape import ScrapeServer
from edgert_deploy.fleet.subscriber import FleetSubscriber

PORT = 9464
OTLP_EVERY = "60s"

EPILOG = f"""\b
Examples:
  edgert fleet export --broker broker.local
  edgert fleet export --broker broker.local --listen 0.0.0.0:{PORT} --by site,device,model,version
  edgert fleet export --broker broker.local --share a --listen 127.0.0.1:9465    # one of several
  edgert fleet export --broker broker.local --share a --session one              # and nothing is lost when it restarts
  edgert fleet export --broker broker.local --otlp http://collector:4318

\b
Prometheus 2.40 or newer reads the histograms as native ones (start it with --enable-feature=native-histograms):
  histogram_quantile(0.99, sum by (model, version) (rate(edgert_latency_milliseconds[5m])))
Who asks for text gets classic histograms with a bucket an octave. With --share NAME exporters divide the reports; each
report is in exactly one of them, so sum over all instances. They agree through edgert-exporter/v1/NAME/taken, which
their user must be allowed to write. An exporter keeps nothing on disk: after a restart it counts from 0, which is what
rate() expects. What comes while it is down is missing (others of its share get their part all the same), unless the
broker keeps it: --session NAME, another one for each exporter.

\b
Exit codes: 0 done, 4 refused or misconfigured, 6 the broker cannot be reached.
"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 110})
@broker_options
@click.option(
    "--listen",
    default=f"127.0.0.1:{PORT}",
    show_default=True,
    metavar="HOST:PORT",
    help="Where /metrics is served; port 0 takes a free one.",
)
@click.option(
    "--by", default=",".join(BY_DEFAULT), show_default=True, metavar="WORDS", help="What series are kept apart by."
)
@click.option("--share", metavar="NAME", help="Divide the reports among all exporters of this NAME.")
@session_option
@click.option("--otlp", "otlp_url", metavar="URL", help="Also push to this OTLP endpoint (HTTP, protobuf).")
@click.option(
    "--otlp-every",
    metavar="DURATION",
    type=Duration(0.5),
    default=OTLP_EVERY,
    show_default=True,
    help="How often to push. $OTEL_EXPORTER_OTLP_HEADERS (name=value,...) is sent along.",
)
@for_option
def export(
    settings: MqttSettings,
    site: str | None,
    listen: str,
    by: str,
    share: str | None,
    session_name: str | None,
    otlp_url: str | None,
    otlp_every: float,
    for_s: float | None,
) -> None:
    """Serve the fleet's latency to Prometheus as native histograms, and push it as OTLP."""
    words = words_of(by)
    push_to = otlp.endpoint(otlp_url) if otlp_url else None
    headers = otlp_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    life = secrets.token_hex(6)
    ledger = Ledger(session_name or f"b{life}", share, life)
    exporter = Exporter(ledger, words, clock=time.monotonic, wall_clock=time.time)
    also = (ledger.topic,) if ledger.topic else ()
    client_id, session = named_session("export", session_name)
    subscriber = FleetSubscriber(
        settings,
        exporter,
        site,
        client_id=client_id,
        share=share,
        also=also,
        session=session,
        settled=lambda: exporter.settled,
        on_reconnected=exporter.told_nothing,
        log=_say,
    )
    server = ScrapeServer(Exposition(exporter), *host_and_port(listen, PORT))
    try:
        subscriber.open()
        _say(f"bridging {settings.address}; Prometheus reads port {server.port}, path /metrics")
        stop, pushed_at, said = stopping(for_s), time.monotonic(), ""
        while not stop():
            subscriber.listen(FLUSH_EVERY_S)
            for topic, payload in exporter.due(time.monotonic(), subscriber.room):
                subscriber.publish(topic, payload)
            if push_to and time.monotonic() - pushed_at >= otlp_every:
                pushed_at = time.monotonic()
                said = _push(push_to, exporter, headers, said)
        if push_to:
            _push(push_to, exporter, headers, said)
    finally:
        subscriber.close()
        server.close()


def words_of(by: str) -> tuple[str, ...]:
    """Raises ConfigInvalid."""
    words = tuple(dict.fromkeys(word.strip() for word in by.split(",") if word.strip()))
    if unknown := [word for word in words if word not in DIMENSIONS]:
        raise ConfigInvalid(f"--by {unknown[0]!r} is nothing that reports differ by; known: {', '.join(DIMENSIONS)}")
    return words


def otlp_headers(text: str) -> dict[str, str]:
    """`name=value,name=value`, as OpenTelemetry's own variable has it. Raises ConfigInvalid."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if any(not name.strip() or not equals for name, equals, _ in pairs):
        raise ConfigInvalid("$OTEL_EXPORTER_OTLP_HEADERS is not NAME=VALUE,NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _push(url: str, exporter: Exporter, headers: dict[str, str], said: str) -> str:
    """Push, and say when it begins to fail and when it works again; what was said last."""
    try:
        otlp.push(url, exporter, time.time(), headers)
    except otlp.OtlpFailed as error:
        if error.message != said:
            _say(f"{error.message}; the next push holds everything")
        return error.message
    if said:
        _say("the OTLP endpoint takes metrics again")
    return ""


def _say(line: str) -> None:
    click.echo(printable(f"export: {line}"), err=True)
