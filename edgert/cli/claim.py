"""`edgertd claim` and `edgertd unclaim`: only one deployment changes a model at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import click

from edgert.cli.output import emit, json_option
from edgert.cli.quantity import Duration
from edgert.config import read_config
from edgert.errors import EdgeRTError
from edgert.names import check_model_name
from edgert.state_dir import StateDir
from edgert.versions.claims import LASTS_S_MAX, Claims

F = TypeVar("F", bound=Callable[..., Any])


@click.command(hidden=True)
@click.argument("model")
@click.option("--by", required=True, help="The user and host of the deployment: user@host.")
@click.option(
    "--for",
    "for_s",
    type=Duration(1, LASTS_S_MAX),
    default="3m",
    show_default=True,
    help="Time after which the claim expires unless a command uses it again.",
)
@click.option(
    "--instead-of",
    multiple=True,
    metavar="TOKEN",
    help="Replace this claim, whose deployment is over. May be repeated.",
)
@click.option(
    "--token", default="", metavar="TOKEN", help="The token of the claim: MODEL.DIGITS, with 16 hexadecimal digits."
)
@json_option
@click.pass_obj
def claim(
    state: StateDir, model: str, by: str, for_s: float, instead_of: tuple[str, ...], token: str, as_json: bool
) -> None:
    """Claim MODEL for one deployment. Until the claim is released or expires, nobody else can claim MODEL.

    `edgert deploy` runs this command. Give the printed token to the next commands as --claim. A claim prevents other
    claims only: a command without --claim still works.

    \b
    Example:
      edgertd claim digits --by "$USER@$(hostname)"
    """
    from edgert.cli.list_files import files_here
    from edgert.cli.status import device_status

    check_model_name(model)
    config = read_config(state)
    new = Claims(state, config.device).acquire(model, by[:200], for_s, instead_of, token)
    # Read the status after the claim, because an earlier status may be out of date.
    answer = {"token": new.token, "status": device_status(state, config).as_json()}
    with contextlib.suppress(EdgeRTError, OSError):  # damaged slots: `list-files` reports the reason if a host needs it
        answer["here"] = files_here(state, model)
    emit(answer, new.token, as_json)


@click.command(hidden=True)
@click.argument("token")
@json_option
@click.pass_obj
def unclaim(state: StateDir, token: str, as_json: bool) -> None:
    """Release a claim. If the claim has ended, the command changes nothing.

    \b
    Example:
      edgertd unclaim digits.0123456789abcdef
    """
    Claims(state, read_config(state).device).release(token)
    emit({"released": token}, f"{token} is released", as_json)


def claim_option(command: F) -> F:
    """Add the option --claim TOKEN."""
    return click.option(
        "--claim", "token", default="", metavar="TOKEN", hidden=True, help="The token of a claim (edgertd claim)."
    )(command)
