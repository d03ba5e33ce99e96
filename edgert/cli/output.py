"""Output of `edgertd` and `edgert`: one JSON object or text on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import click

from edgert.printable import printable

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def emit(value: dict[str, Any], text: str, as_json: bool) -> None:
    """Print the result: `value` as JSON, or `text`."""
    click.echo(json.dumps(value) if as_json else printable(text))


def progress(line: str) -> None:
    """Print a line of progress. If stderr cannot be written, the line is lost and the command continues."""
    with contextlib.suppress(OSError):
        click.echo(printable(line), err=True)
