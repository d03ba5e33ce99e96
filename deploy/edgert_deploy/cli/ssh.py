"""`edgert ssh`: open a shell on a device, or run one command there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import click

from edgert_deploy.cli.shared.options import device_argument, inventory_option
from edgert_deploy.devices.inventory import Inventory


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-t", "--tty", is_flag=True, help="Allocate a terminal for the command; top and editors need one.")
@inventory_option
@device_argument()
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def ssh(tty: bool, inventory: Inventory, selector: str, command: tuple[str, ...]) -> None:
    """Open a shell on one device with the system's ssh, or run one COMMAND there.

    ssh accepts only the host keys in the inventory, for the device and for the jump host. User, port, identity and jump
    host come from the inventory, other settings from ~/.ssh/config. A shell on the device interprets COMMAND, as with
    ssh. The exit code is COMMAND's code, or 255 if ssh could not connect.

    \b
    Examples:
      edgert ssh kitchen
      edgert ssh kitchen -- uptime
      edgert ssh -t kitchen -- top
    """
    from edgert_deploy.devices.transports.system_ssh import ssh_command

    device = inventory.device(selector)
    command = command[1:] if command[:1] == ("--",) else command
    if device.kind.uses_ssh:
        with ssh_command(device, *(["-t"] if tty else [])) as words:
            code = run_interactive([*words, *command])
    else:
        shell = os.environ.get("SHELL") or "/bin/sh"
        code = run_interactive([shell, "-c", " ".join(command)] if command else [shell])
    click.get_current_context().exit(code)


def run_interactive(words: Sequence[str]) -> int:
    """Run a program that handles Ctrl-C itself; return its exit code as a shell reports it."""
    with _left_to_the_program(), subprocess.Popen(words) as process:
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _left_to_the_program() -> Iterator[None]:
    before: Any = signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which the program would inherit
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
