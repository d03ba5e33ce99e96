"""Helpers that call `edgert` and return its exit code and JSON, and that list the commands of a group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from edgert.bundle.signing import SigningKey, new_key, write_key_pair
from edgert.cli import main as edgertd
from edgert_deploy.cli import main
from edgert_deploy.common.keys import key_paths


class Edgert:
    """Run `edgert WORDS --json`; return the exit code and the object on stdout."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.stderr = ""

    def __call__(self, *words: object) -> tuple[int, dict[str, Any]]:
        self._capfd.readouterr()
        code = main([*map(str, words), "--json"])
        out, self.stderr = self._capfd.readouterr()
        return code, json.loads(out)


def own_key(folder: Path, name: str = "default") -> SigningKey:
    """Make a key of the user, whose configuration is in `folder`/conf."""
    key = new_key()
    write_key_pair(key, *key_paths(folder / "conf" / "keys", name))
    return key


def commands_of(group: click.Group) -> list[tuple[list[str], click.Command]]:
    """Yield the group and each command that its --help lists, with the words that call the command."""
    found: list[tuple[list[str], click.Command]] = [([], group)]
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = commands_of(command) if isinstance(command, click.Group) else [([], command)]
        found += [([name, *words], one) for words, one in below]
    return found


def live(edgert: Edgert) -> tuple[int, str]:
    """The live release of `echo` on `here`, and the state of its slots."""
    (model,) = edgert("status", "here")[1]["devices"][0]["status"]["models"]
    return model["live"]["release"], model["state"]


def stop(state: Path) -> None:
    """Stop the daemon of a device, if it was bootstrapped."""
    if not (state / "config.toml").exists():
        return
    assert edgertd(["--state", str(state), "stop"]) == 0
