"""The rows of a benchmark, as a table or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def emit(rows: Sequence[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    """Print rows as JSON lines, or as a Markdown table of `columns`."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")


def emit_figures(figures: Mapping[str, Any], as_json: bool) -> None:
    """Print named figures as one JSON object, or one figure per line."""
    if as_json:
        print(json.dumps(figures), flush=True)
        return
    for name, value in figures.items():
        print(f"{name:44} {value:,}" if isinstance(value, (int, float)) else f"{name:44} {value}")
    print(flush=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
