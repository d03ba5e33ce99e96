"""`edgertd stop`."""

from __future__ import annotations

import click

from edgert.cli.output import emit, json_option
from edgert.config import StateDir
from edgert.durable import locked
from edgert.errors import DaemonUnreachable, DeviceError
from edgert.protocol.control import ask

STOP_S_MAX = 30.0


@click.command()
@json_option
@click.pass_obj
def stop(state: StateDir, as_json: bool) -> None:
    """Stop the daemon. It answers the requests that have arrived and refuses new ones. Does nothing if none runs.

    \b
    Example:
      edgertd stop
    """
    try:
        pid = ask(state.control_socket, {"op": "stop"}, 5.0)["pid"]
    except DaemonUnreachable:
        emit({"stopped": False}, "no daemon runs", as_json)
        return
    try:
        locked(state.pid, STOP_S_MAX).close()
    except BlockingIOError as error:
        raise DeviceError(f"the daemon (pid {pid}) still runs after {STOP_S_MAX:.0f} s: see {state.log}") from error
    emit({"stopped": True, "pid": pid}, f"edgertd (pid {pid}) has stopped", as_json)
