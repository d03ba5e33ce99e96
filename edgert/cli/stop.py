"""`edgertd stop`."""

from __future__ import annotations

import click

from edgert.cli.output import emit
from edgert.config import StateDir
from edgert.durable import locked
from edgert.errors import DaemonUnreachable, DeviceError
from edgert.protocol.control import ask

STOP_S_MAX = 30.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def stop(state: StateDir, as_json: bool) -> None:
    """Stop the daemon: what has arrived is answered, what comes after is refused. Does nothing where none runs.

    \b
    Example:
      edgertd stop
    """
    try:
        pid = ask(state.control_socket, {"op": "stop"}, 5.0)["pid"]
    except DaemonUnreachable:
        emit({"stopped": False}, "no daemon runs here", as_json)
        return
    try:
        locked(state.pid, STOP_S_MAX).close()
    except BlockingIOError as error:
        raise DeviceError(f"the daemon (pid {pid}) still runs after {STOP_S_MAX:.0f} s; look at {state.log}") from error
    emit({"stopped": True, "pid": pid}, f"edgertd (pid {pid}) has stopped", as_json)
