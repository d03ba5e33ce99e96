"""How `edgertd` prints: one JSON object or one text on stdout, progress on stderr."""

from __future__ import annotations

import json
from typing import Any

import click


def emit(value: dict[str, Any], text: str, as_json: bool) -> None:
    click.echo(json.dumps(value) if as_json else text)


def progress(line: str) -> None:
    click.echo(line, err=True)
