"""`edgert fleet ui`: the fleet as a web page on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click

from edgert.cli.output import emit, json_option, progress
from edgert.durable import os_error_as
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.printable import endpoint
from edgert.telemetry.messages import wall_ms
from edgert.telemetry.mqtt import MqttSettings
from edgert_deploy.cli.shared.broker_options import broker_options
from edgert_deploy.cli.shared.option_groups import SectionedCommand
from edgert_deploy.cli.shared.options import for_option, listen_option_of, store_option_of
from edgert_deploy.cli.shared.stopping import stopping
from edgert_deploy.cli.shared.types import FILE_NAME, Size
from edgert_deploy.common.folders import state_folder
from edgert_deploy.common.project import find_project
from edgert_deploy.common.quantities import size_text
from edgert_deploy.fleet.ui.access import Access, is_loopback, new_token

PORT = 8765
TICK_S = 1.0
TEAM_S = 5.0
BASELINES_EVERY_S = 3600.0
OWN_SIZE = "2GB"
TOKEN_CHARS_MIN = 16


def _web_address(_context: click.Context, _option: click.Parameter, text: str | None) -> str:
    if text and not text.startswith(("http://", "https://")):
        raise ConfigInvalid(f"--alerts {text!r} is not a web address: give http://HOST:9093")
    return text or ""


@click.command(cls=SectionedCommand)
@broker_options
@store_option_of("The store of reports", "a store of the page's own")
@listen_option_of("the page", PORT)
@click.option(
    "--name", "names", multiple=True, metavar="NAME", help="A name that browsers use for this machine. May be repeated."
)
@click.option(
    "--token-file",
    type=FILE_NAME,
    metavar="FILE",
    help="File whose first line is the token [default: a new one at each start].",
)
@click.option(
    "--size",
    "size_bytes",
    type=Size(10_000_000),
    default=OWN_SIZE,
    show_default=True,
    help="The largest size of the page's own store; the oldest windows are removed first.",
)
@click.option("--alerts", metavar="URL", callback=_web_address, help="An Alertmanager, to which the page links.")
@json_option
@for_option
def ui(
    settings: MqttSettings,
    site: str | None,
    store_url: str | None,
    listen: tuple[str, int],
    names: tuple[str, ...],
    token_file: str | None,
    size_bytes: int,
    alerts: str,
    as_json: bool,
    for_s: float | None,
) -> None:
    """Show the fleet live as a web page: devices, latency by version, stages, heat-map, alarms, rollouts.

    The state on the page comes from the broker. The curves come from the store that `edgert fleet record` fills
    (--store). Without --store, the command fills a store of its own while it runs; stderr names the file. The page
    shows the project's rollouts to devices that report to this broker. It fetches nothing from the network and changes
    nothing.

    The server listens on loopback, where every user of this machine can read the page. With another address, it
    requires the token in the printed address. The connection is not encrypted: put a TLS proxy before the server, or
    use ssh.

    The exit code is 4 if an option cannot be used or the broker refuses the login, and 6 if the broker or the store
    cannot be reached.

    \b
    Examples:
      edgert fleet ui --broker broker.local
      edgert fleet ui --broker broker.local --store postgresql://ops@db/fleet
      edgert fleet ui --broker broker.example --tls --username ops --password-file pw --listen 127.0.0.1:9000
      ssh -L 8765:127.0.0.1:8765 ops-host   # for a page on another host: then open http://127.0.0.1:8765/
    """
    # Imported here, because --help needs no database.
    from edgert_deploy.cli.shared.team import open_rollouts
    from edgert_deploy.fleet.store.query import FleetQuery
    from edgert_deploy.fleet.store.recorder import Recorder
    from edgert_deploy.fleet.store.retention import Retention
    from edgert_deploy.fleet.store.store import Store
    from edgert_deploy.fleet.subscriber import CONNECTED_AGAIN, FleetSubscriber
    from edgert_deploy.fleet.ui.answers import Answers
    from edgert_deploy.fleet.ui.fleet_state import FleetState
    from edgert_deploy.fleet.ui.history import History, baselines, versions_seen
    from edgert_deploy.fleet.ui.live_views import LiveViews
    from edgert_deploy.fleet.ui.rollouts import Rollouts
    from edgert_deploy.fleet.ui.server import PageServer

    host, port = listen
    access = access_for(host, names, token_file)
    path = store_url or own_store(settings)
    own = None if store_url else Store(path, _print_status)
    recorder = own and Recorder(own, wall_ms, Retention(size_bytes_max=size_bytes))
    query = FleetQuery(path)
    targets = find_project().p99_target_ms
    fleet = FleetState(wall_ms, targets)
    fleet.load_devices(query.devices(), time.monotonic())
    fleet.load_versions(versions_seen(query, wall_ms()))
    rollouts = open_rollouts()
    live_views = LiveViews(fleet, Rollouts(rollouts.without_team()), time.monotonic, wall_ms)

    def note(line: str) -> None:
        _print_status(line)
        live_views.trouble = "" if line == CONNECTED_AGAIN else line

    subscriber = FleetSubscriber(settings, [fleet, *([recorder] if recorder else [])], site, log=note)
    subscriber.open()
    server = PageServer(Answers(live_views, History(query, wall_ms, targets=targets), site), access, host, port, alerts)
    address = address_of(access, host, server.port)
    emit({"url": address, "own_store": own and path}, address, as_json)
    sys.stdout.flush()
    _print_status(f"listening to {settings.address}; Ctrl-C ends it")
    if own:
        _print_status(f"no --store given: recording to {path} (at most {size_text(size_bytes)})")
    _warn_if_reachable(host)
    stop = stopping(for_s)
    _repeat_in_background(lambda: fleet.load_baselines(baselines(query, wall_ms())), BASELINES_EVERY_S)
    if rollouts.has_team:  # other hosts may change the rollouts
        _repeat_in_background(rollouts.sync, TEAM_S)
    try:
        while not stop():
            subscriber.listen(TICK_S)
            if recorder:
                recorder.flush_or_wait(_print_status)
                recorder.prune_when_due(_print_status)
            live_views.tick()
    finally:
        live_views.close()
        subscriber.close()
        server.close()
        query.close()
        if own and recorder:
            recorder.flush_or_wait(_print_status)
            own.close()


def access_for(host: str, names: tuple[str, ...], token_file: str | None) -> Access:
    """Return the host names and the token that give access to the page. Raises ConfigInvalid."""
    token = None if is_loopback(host) and token_file is None else new_token()
    if token_file is not None:
        try:
            token = Path(token_file).read_text("utf-8-sig").splitlines()[0].strip()
        except (OSError, IndexError, UnicodeDecodeError) as error:
            raise ConfigInvalid(
                f"--token-file {token_file} cannot be read: {error}. Write a token to its first line"
            ) from error
        if len(token) < TOKEN_CHARS_MIN or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
            raise ConfigInvalid(
                f"--token-file {token_file}: a token has {TOKEN_CHARS_MIN} or more of A-Z a-z 0-9 - _; "
                "make one with: python3 -c 'import secrets; print(secrets.token_urlsafe())'"
            )
    host_names = (host, socket.gethostname(), *names) if token else (host, *names)
    # Browsers send cookies to every port of a host, so each page has a cookie name of its own.
    cookie = f"edgert_fleet_{hashlib.sha256(token.encode()).hexdigest()[:8]}" if token else ""
    return Access(frozenset(name.strip("[]").lower() for name in host_names), token, cookie)


def own_store(settings: MqttSettings) -> str:
    """Return the file of the page's own store for this broker's reports. Raises ConfigInvalid."""
    folder = state_folder()
    with os_error_as(ConfigInvalid, f"cannot make {folder}", "give a store with --store FILE"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(folder / f"ui-{hashlib.sha256(settings.address.encode()).hexdigest()[:8]}.db")


def _warn_if_reachable(host: str) -> None:
    if not is_loopback(host):
        _print_status(
            f"warning: the network can reach {host}, and the connection is not encrypted: anybody who has the token can read the page. "
            "Keep this port inside your own network, or behind a proxy with TLS"
        )


def _repeat_in_background(work: Callable[[], None], every_s: float) -> None:
    """Do `work` every `every_s` until the process ends. If `work` fails, the page keeps its present data."""

    def repeat() -> None:
        while True:
            with contextlib.suppress(EdgeRTError):
                work()
            time.sleep(every_s)

    threading.Thread(target=repeat, daemon=True).start()


def address_of(access: Access, host: str, port: int) -> str:
    """Return the address to open in a browser."""
    where = endpoint(socket.gethostname() if host in ("0.0.0.0", "::") else host, port)
    return f"http://{where}/" + (f"?token={access.token}" if access.token else "")


def _print_status(line: str) -> None:
    progress(f"ui: {line}")
