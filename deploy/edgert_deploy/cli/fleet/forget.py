"""`edgert fleet forget`: remove a device that no longer exists from the broker and from a store."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing

import click

from edgert.cli.output import emit, json_option, progress
from edgert.errors import ConfigInvalid, DeviceError
from edgert.names import checked_id
from edgert.printable import counted
from edgert.telemetry import messages
from edgert.telemetry.home_assistant import discovery_topic
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import BrokerRefused, Connection, MqttSettings
from edgert.telemetry.retained import retain
from edgert_deploy.cli.shared.broker_options import broker_options
from edgert_deploy.cli.shared.option_groups import SectionedCommand
from edgert_deploy.cli.shared.options import store_option_of
from edgert_deploy.fleet.store.database import NoReports
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.store.store import Store

SETTLE_S = 1.0  # the broker has sent everything once no message arrives for this time


@click.command(cls=SectionedCommand)
@click.argument("device")
@broker_options
@store_option_of("Also remove the device's rows from this store", "none")
@click.option(
    "--force",
    is_flag=True,
    help="Forget the device even if its status is online: the status is outdated if device and broker failed at the same time.",
)
@json_option
def forget(
    settings: MqttSettings, site: str | None, device: str, store_url: str | None, force: bool, as_json: bool
) -> None:
    """Forget DEVICE: clear its retained messages at the broker; remove its rows from a store.

    Use this command for a device that no longer exists; `edgert uninstall` clears a device's retained messages itself.
    The command clears `status`, `info`, `deploy` and Home Assistant's discovery, so that new subscribers do not see the
    device. With a store, it also removes every row of the device. Sums over groups of devices stay, because they name
    no device. The broker must let this user write the device's topics.

    The exit code is 4 if an option cannot be used or the broker refuses, 6 if the broker or the store cannot be
    reached, and 7 if the device is online.

    \b
    Examples:
      edgert fleet forget pi-07 --broker broker.local
      edgert fleet forget pi-07 --site plant-a --broker broker.local --store /var/lib/edgert/fleet.db
    """
    checked_id("device", device)
    # The command detects a wrong store before it clears anything, and it creates no store.
    stored: list[str] = []
    if store_url:
        try:
            stored = _stored_sites(store_url, device)
        except NoReports as error:  # no row to remove; a team's rollouts may be in this store
            progress(error.message)
            store_url = None
    retained = _retained(settings, site, device)
    sites = _sites(retained, site) or stored  # after an uninstall, only the store knows the site
    if len(sites) > 1:
        raise ConfigInvalid(f"there is a {device} at {', '.join(sites)}: choose with --site")
    if any(payload == b"online" for payload in retained.values()) and not force:
        raise DeviceError(
            f"{device} is online: uninstall it first. If this status is outdated because the device and the broker failed "
            "at the same time, pass --force"
        )
    if retained:
        retain(settings, dict.fromkeys(retained, b""))
        if still_retained := _retained(settings, site, device):
            raise BrokerRefused(
                f"the broker {settings.address} still retains {', '.join(still_retained)}: its access list does not let this user "
                "write these topics (docs/telemetry.md), or the device publishes again"
            )
    rows = _rows_removed(store_url, sites, device) if store_url else 0
    text = f"{device}: {counted(len(retained), 'retained message')} cleared" + (
        f", {counted(rows, 'row')} removed" if store_url else ""
    )
    emit({"device": device, "site": next(iter(sites), None), "topics": sorted(retained), "rows": rows}, text, as_json)


def _retained(settings: MqttSettings, site: str | None, device: str) -> dict[str, bytes]:
    """Return the device's retained messages by topic. If `site` is None, include every site."""
    retained_by_topic: dict[str, bytes] = {}
    last_message_at = time.monotonic()

    def received(topic: str, payload: bytes, retained: bool) -> None:
        nonlocal last_message_at
        if retained and payload:
            retained_by_topic[topic], last_message_at = payload, time.monotonic()

    def listen(topic_filter: str) -> None:
        nonlocal last_message_at
        connection.subscribe((topic_filter,), 1)
        last_message_at = time.monotonic()
        while time.monotonic() - last_message_at < SETTLE_S:
            connection.pump(0.1)

    with closing(Connection(settings, on_message=received)) as connection:
        connection.open()
        listen(f"{messages.ROOT}/{site or '+'}/{device}/#")
        for its_site in _sites(retained_by_topic, site):
            listen(discovery_topic(Topics(its_site, device), "+"))
    return retained_by_topic


def _sites(topics: Iterable[str], site: str | None) -> list[str]:
    """Return the sites in the topics of devices, and `site` if it is not None."""
    named = {messages.parse_topic(topic).site for topic in topics if topic.startswith(f"{messages.ROOT}/")}
    return sorted(named | ({site} if site else set()))


def _stored_sites(store_url: str, device: str) -> list[str]:
    """Return the sites at which the store has the device. Raises ConfigInvalid or StoreFailed."""
    with closing(FleetQuery(store_url)) as query:
        return [row["site"] for row in query.devices() if row["device"] == device]


def _rows_removed(store_url: str, sites: list[str], device: str) -> int:
    if not sites:
        raise ConfigInvalid(f"neither the broker nor the store has a {device}: check the name, or add --site")
    with closing(Store(store_url, progress)) as store:
        return store.forget(sites[0], device)
