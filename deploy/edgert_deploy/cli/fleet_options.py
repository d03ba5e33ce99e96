"""What the fleet's commands share: the option for the inventory, progress lines, a plain table."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from edgert_deploy.common.project import find_bundle, find_project

F = TypeVar("F", bound=Callable[..., Any])

_LINE = threading.Lock()


def inventory_option(command: F) -> F:
    """--inventory FILE."""
    return click.option(
        "--inventory",
        "inventory_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The fleet [default: ./inventory.toml, the project's, or inventory.toml in the user's configuration].",
    )(command)


def json_option(command: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(command)


class SelectorWord(click.types.StringParamType):
    """SELECTOR; where it is missing, the other place to write it is named."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return (
            'Names, groups or `all`; or write it once, as `selector = "all"` in a project\'s edgert.toml (edgert init).'
        )


class BundlePath(click.Path):
    """A bundle that is there. A mere name may also be one in the project's folder of bundles."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return find_bundle(Path(os.fsdecode(super().convert(value, param, ctx))))


class NewBundlePath(BundlePath):
    """A bundle to be written: a mere name goes into the project's folder of bundles, where it names one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(click.Path.convert(self, value, param, ctx)))
        project = find_project() if path.parent == Path() else None
        if project is None or project.bundles is None:
            return path
        project.bundles.mkdir(parents=True, exist_ok=True)
        return project.bundles / path


def say(device: str, line: str) -> None:
    """A progress line about a device, or with "" about all of them, on stderr; from any thread."""
    with _LINE:
        click.echo(f"[{device}] {line}" if device else line, err=True)


def emit(value: dict[str, Any], text: str, as_json: bool) -> None:
    click.echo(json.dumps(value) if as_json else text)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def error_lines(errors: Sequence[tuple[str, str, str]]) -> str:
    """What went wrong, one line a device, to stand below a table: device, code, message. "" where nothing did."""
    # Most messages begin with the device's name already.
    return "".join(f"{name} [{code}]: {message.removeprefix(f'{name}: ')}\n" for name, code, message in errors)
