"""`edgertd check`."""

from __future__ import annotations

import contextlib

import click

from edgert.cli.claim import claim_option
from edgert.cli.output import emit, json_option
from edgert.cli.slot_commands import store_of
from edgert.config import read_config
from edgert.errors import EdgeRTError
from edgert.printable import counted
from edgert.protocol.control import ask
from edgert.state_dir import StateDir
from edgert.versions.claims import under_claim


@click.command()
@click.argument("model")
@claim_option
@json_option
@click.pass_obj
def check(state: StateDir, model: str, token: str, as_json: bool) -> None:
    """Send MODEL's golden inputs through the daemon's socket, like an app, and compare the answers.

    The exit code is 9 if an answer is outside the signed tolerance.

    \b
    Example:
      edgertd check digits --json
    """
    from edgert.checks.health import check_served

    with under_claim(state, token):
        result = check_served(model, store_of(state, model), state, read_config(state))
        with contextlib.suppress(EdgeRTError):  # if this fails, a trial counts these requests as requests of apps
            ask(state.control_socket, {"op": "checked", "model": model, "samples": result["samples"]})
    text = (
        f"release {result['release']} of {model} answers correctly on {result['engine']}: "
        f"{counted(result['samples'], 'golden input')}, worst difference {max(result['worst']):.3g}, p50 {result['p50_ms']:.2f} ms"
    )
    emit(result, text, as_json)
