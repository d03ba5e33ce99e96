"""`edgertd serve`."""

from __future__ import annotations

import click

from edgert.state_dir import StateDir


@click.command()
@click.pass_obj
def serve(state: StateDir) -> None:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C.

    The daemon reports READY to systemd (Type=notify) once every model has loaded.

    \b
    Example:
      edgertd --state /var/lib/edgert serve
    """
    from edgert.daemon.supervisor import Supervisor

    Supervisor(state).run()
