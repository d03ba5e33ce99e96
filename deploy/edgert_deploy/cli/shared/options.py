"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgert.cli.quantity import Duration
from edgert.versions.trial_limits import LIMIT_NAMES
from edgert_deploy.cli.shared.types import FILE, OneDevice, Selector
from edgert_deploy.common.addresses import host_and_port

if TYPE_CHECKING:
    from edgert_deploy.devices.inventory import Inventory

F = TypeVar("F", bound=Callable[..., Any])

STORE_DEFAULT = "fleet.db"


def _inventory(_context: click.Context, _option: click.Parameter, file: Path | None) -> Inventory:
    from edgert_deploy.devices.inventory import find_inventory

    return find_inventory(file)


# The command receives the inventory as `inventory`.
inventory_option = click.option(
    "--inventory",
    type=FILE,
    callback=_inventory,
    is_eager=True,  # click reads it first: a shell completes SELECTOR from the inventory
    help="The inventory file, which lists the devices [default: the project's].",
)

profiles_option = click.option(
    "--profiles",
    "profiles_dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    is_eager=True,  # click reads it first: a shell completes --profile from this folder
    help="Folder with device profiles of your own, besides ./profiles and the profiles that ship with edgert.",
)

same_machine_option = click.option(
    "--same-machine", is_flag=True, help="Allow a device with the host key of another device in the inventory."
)

verbose_option = click.option("-v", "--verbose", is_flag=True, help="Print each step and each result of every device.")

yes_option = click.option("--yes", is_flag=True, help="Confirm without a prompt.")

limit_option = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help=f"A trial limit that the device watches: {', '.join(LIMIT_NAMES)}. May be repeated.",
)

for_option = click.option("--for", "for_s", type=Duration(least_s=0.1), help="Stop after this time: 30s, 10m.")


def store_option_of(purpose: str, without: str, default: str | None = None) -> Callable[[F], F]:
    """Add --store; the command receives it as `store_url`. `without` describes the default store."""
    return click.option(
        "--store",
        "store_url",
        metavar="URL",
        envvar="EDGERT_STORE",
        default=default,
        help=f"{purpose}: a file, sqlite:///FILE or postgresql://USER@HOST/DATABASE with its password in ~/.pgpass "
        f"[default: $EDGERT_STORE, else the project's, else {without}].",
    )


def listen_option_of(purpose: str, port: int) -> Callable[[F], F]:
    """Add --listen, by default `port` of loopback. The command receives `listen`: host and port."""

    def address(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, int]:
        return host_and_port(text, port, port_min=0)

    return click.option(
        "--listen",
        default=f"127.0.0.1:{port}",
        show_default=True,
        metavar="HOST:PORT",
        callback=address,
        help=f"The address of {purpose}; port 0 chooses a free port.",
    )


store_option = store_option_of("The store of reports", f"./{STORE_DEFAULT}", STORE_DEFAULT)


def selector_argument(default: str | None = None, *, required: bool = True) -> Callable[[F], F]:
    """Add SELECTOR, the devices for a command; the command receives it as `selector`."""
    if default is None:
        return click.argument("selector", type=Selector(), required=required)
    return click.argument("selector", type=Selector(), default=default)


def device_argument(*, required: bool = True) -> Callable[[F], F]:
    """Add the SELECTOR of one device; the command receives it as `selector`."""
    return click.argument("selector", type=OneDevice(), required=required)
