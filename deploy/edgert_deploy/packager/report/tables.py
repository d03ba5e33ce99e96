"""Tables of the page: cells are HTML, escaped by who wrote them; headings, captions and keys are plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

ROWS_SHOWN_MAX = 20  # of a long table; the rest is folded away
ROWS_MAX = 2000
NUMBER, PLOT = "n", "p"  # classes of columns

Cell = str  # of HTML
Column = tuple[str, str]  # heading, class


def legend(entries: Iterable[tuple[str, str]]) -> str:
    return (
        '<ul class="key">'
        + "".join(f"<li>{f'<i class={name!r}></i>' if name else ''}{escape(text)}</li>" for name, text in entries)
        + "</ul>"
    )


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    """A table that scrolls by itself where it is too wide; what is behind ROWS_SHOWN_MAX rows is folded away."""
    first = _one(caption, columns, rows[:ROWS_SHOWN_MAX])
    rest = rows[ROWS_SHOWN_MAX:ROWS_MAX]
    if not rest:
        return first
    left = f" ({len(rows) - ROWS_MAX} more are left out)" if len(rows) > ROWS_MAX else ""
    return (
        first
        + f"<details><summary>{len(rest)} more{left}</summary>{_one(f'{caption}, the rest', columns, rest)}</details>"
    )


def _one(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    head = "".join(
        f'<th scope="col"{_class(kind)}>{escape(name)}</th>' if name else f"<td{_class(kind)}></td>"
        for name, kind in columns
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if i == 0 else f"<td{_class(columns[i][1])}>{cell}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    label = escape(caption or "Facts", quote=True)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    heading = f"<thead><tr>{head}</tr></thead>" if any(name for name, _ in columns) else ""
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{label}"><table>{named}{heading}<tbody>{body}</tbody></table></div>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
