"""`edgertd self-test`."""

from __future__ import annotations

import sys

import click

from edgert import __version__
from edgert.cli.output import emit, json_option, progress
from edgert.config import read_config
from edgert.state_dir import StateDir
from edgert.versions.slot_store import SlotStore


@click.command("self-test")
@click.argument("models", nargs=-1)
@json_option
@click.pass_obj
def self_test(state: StateDir, models: tuple[str, ...], as_json: bool) -> None:
    """Load MODELS (default: all live ones) without the daemon and compare their golden answers.

    `edgert bootstrap --upgrade` runs this command with a new runtime before the device switches to this runtime. The
    exit code is 9 if an answer is outside the signed tolerance.

    \b
    Example:
      /opt/edgert/venvs/0123456789abcdef/bin/edgertd self-test
    """
    from edgert.checks.self_test import self_test as test_model

    config = read_config(state)
    names = models or tuple(
        name for name in state.model_names() if SlotStore(state.models / name).read().live is not None
    )
    results = [test_model(name, state, config, progress) for name in names]
    lines = [
        f"{each['model']}: release {each['release']} answers correctly on {each['engine']} {each['engine_version']}"
        + (f"; not on: {'; '.join(each['tried'])}" if each["tried"] else "")
        for each in results
    ]
    value = {"edgert": __version__, "runtime": sys.prefix, "models": results}
    emit(value, "\n".join([f"edgert {__version__} in {sys.prefix}", *lines]), as_json)
