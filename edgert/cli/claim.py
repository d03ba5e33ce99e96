"""`edgertd claim` and `edgertd release`: keep deployments of one model apart."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from edgert.bundle.manifest import MODEL_NAME
from edgert.cli.output import emit
from edgert.config import StateDir, read_config
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.versions.claims import LASTS_S_MAX, Claims

CLAIMING_S = 60.0  # renewed while it is needed: for how long one that was killed stands in the way

F = TypeVar("F", bound=Callable[..., Any])


@click.command()
@click.argument("model")
@click.option("--by", required=True, help="Who deploys, as others shall read it: user@host.")
@click.option(
    "--for-s",
    type=click.FloatRange(min=1, max=LASTS_S_MAX),
    default=180.0,
    show_default=True,
    help="Seconds after which the claim runs out, unless a command shows it again.",
)
@click.option("--instead-of", default="", metavar="TOKEN", help="Take the place of this claim, known to be over.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def claim(state: StateDir, model: str, by: str, for_s: float, instead_of: str, as_json: bool) -> None:
    """Claim MODEL for one deployment: until it is released or runs out, no other can claim it.

    `edgert deploy` does this by itself. The token that is printed goes to the next commands as --claim.
    It holds up other claims only: a command without --claim works as ever.

    \b
    Example:
      edgertd claim digits --by "$USER@$(hostname)"
    """
    from edgert.cli.status import device_status

    if not MODEL_NAME.fullmatch(model):
        raise ConfigInvalid(f"{model[:80]!r} is no model's name: a letter, then at most 62 of a-z 0-9 _ -")
    config = read_config(state)
    taken = Claims(state.root, config.device).take(model, by[:200], for_s, instead_of)
    # The status as it is under the claim: what was asked before may be out of date.
    emit({"token": taken.token, "status": device_status(state, config).as_json()}, taken.token, as_json)


@click.command()
@click.argument("token")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def release(state: StateDir, token: str, as_json: bool) -> None:
    """Release a claim. Does nothing where it ran out or another took its place.

    \b
    Example:
      edgertd release digits.0123456789abcdef
    """
    Claims(state.root, read_config(state).device).release(token)
    emit({"released": token}, f"{token} is released", as_json)


def claim_option(command: F) -> F:
    """--claim TOKEN."""
    return click.option(
        "--claim", "token", default="", metavar="TOKEN", help="The claim (edgertd claim) under which this is done."
    )(command)


@contextmanager
def claiming(state: StateDir, model: str, by: str) -> Iterator[None]:
    """Hold `model` for as long as the block takes. Raises DeployUnderWay where a deployment has it."""
    claims = Claims(state.root, read_config(state).device)
    token = claims.take(model, by, CLAIMING_S).token
    try:
        with under_claim(state, token):
            yield
    finally:
        claims.release(token)


@contextmanager
def under_claim(state: StateDir, token: str) -> Iterator[None]:
    """Show the claim, where one is given, for as long as the block takes: an engine may compile for many minutes.

    Raises DeployUnderWay where another took its place.
    """
    if not token:
        yield
        return
    claims, ended = Claims(state.root, read_config(state).device), threading.Event()
    pause_s = claims.show(token).lasts_s / 3

    def keep() -> None:
        while not ended.wait(pause_s):
            with contextlib.suppress(EdgeRTError):
                claims.show(token)

    monitor = threading.Thread(target=keep, daemon=True)
    monitor.start()
    try:
        yield
    finally:
        ended.set()
        monitor.join()
