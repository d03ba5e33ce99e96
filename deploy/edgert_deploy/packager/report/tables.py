"""Tables of the page. Cells are HTML, and the code that makes them escapes them. Headings are text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

ROWS_SHOWN_MAX = 20  # the rows of a long table that are shown; the other rows are folded
ROWS_MAX = 2000
CLASSES = {"#": "n", "~": "p"}  # the style classes of columns of numbers and of columns of plots

Cell = str  # HTML


def code(text: str) -> Cell:
    return f"<code>{escape(text)}</code>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend with an entry for each (class, text)."""
    items = [f"<li>{f'<i class={name!r}></i>' if name else ''}{escape(text)}</li>" for name, text in entries]
    return f'<ul class="key">{"".join(items)}</ul>'


def table(caption: str, columns: str, rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table that scrolls in its own box.

    `columns` are the headings, separated by `|`. A `#` after a heading marks a column of numbers, and `~` one of plots.
    The rows after ROWS_SHOWN_MAX are folded; the rows after ROWS_MAX are only counted.
    """
    parsed = [(name.rstrip("#~"), CLASSES.get(name[-1:], "")) for name in columns.split("|")]
    first = _table_of(caption, parsed, rows[:ROWS_SHOWN_MAX])
    rest = rows[ROWS_SHOWN_MAX:ROWS_MAX]
    if not rest:
        return first
    left = f" ({len(rows) - ROWS_MAX} more are not shown)" if len(rows) > ROWS_MAX else ""
    folded = _table_of(f"{caption}, the rest", parsed, rest)
    return f"{first}<details><summary>{len(rest)} more{left}</summary>{folded}</details>"


def _table_of(caption: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Cell]]) -> str:
    classes = [f' class="{kind}"' if kind else "" for _, kind in columns]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' if name else f"<td{kind}></td>"
        for (name, _), kind in zip(columns, classes, strict=True)
    )
    body = ""
    for first, *others in rows:
        cells = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(others, classes[1:], strict=True))
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>'
    label = escape(caption or "Facts", quote=True)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    heading = f"<thead><tr>{head}</tr></thead>" if any(name for name, _ in columns) else ""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{label}">'
        f"<table>{named}{heading}<tbody>{body}</tbody></table></div>"
    )
