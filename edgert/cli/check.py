"""`edgertd check`."""

from __future__ import annotations

import contextlib

import click

from edgert.cli.claim import claim_option, under_claim
from edgert.cli.output import emit
from edgert.cli.slot_commands import store_of
from edgert.config import StateDir, read_config
from edgert.errors import EdgeRTError
from edgert.protocol.control import ask


@click.command()
@click.argument("model")
@claim_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def check(state: StateDir, model: str, token: str, as_json: bool) -> None:
    """Send MODEL's golden inputs through the daemon's socket, as an app would, and compare its answers.

    Exits with 9 when an answer lies outside the signed tolerance.

    \b
    Example:
      edgertd check digits --json
    """
    from edgert.checks.health import check_served

    with under_claim(state, token):
        result = check_served(model, store_of(state, model), state, read_config(state))
        with contextlib.suppress(EdgeRTError):  # only so that a trial's limits do not take these for apps' requests
            ask(state.control_socket, {"op": "checked", "model": model, "samples": result["samples"]}, 5.0)
    text = (
        f"release {result['release']} of {model} answers rightly on {result['engine']}: "
        f"{result['samples']} golden inputs, worst difference {max(result['worst']):.3g}, p50 {result['p50_ms']:.2f} ms"
    )
    emit(result, text, as_json)
