"""What the fleet's commands share: the option for the inventory, progress lines, a plain table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_LINE = threading.Lock()


def inventory_option(command: F) -> F:
    """--inventory FILE."""
    return click.option(
        "--inventory",
        "inventory_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The fleet [default: ./inventory.toml, else inventory.toml in the user's configuration].",
    )(command)


def json_option(command: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(command)


def say(device: str, line: str) -> None:
    """A progress line about a device, on stderr; from any thread."""
    with _LINE:
        click.echo(f"[{device}] {line}", err=True)


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
