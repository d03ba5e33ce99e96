"""The output of commands: progress on stderr, tables, and errors by cause, without control characters.

Results go to stdout, as in `edgertd` (edgert/cli/output.py).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

from edgert.cli.output import progress
from edgert.printable import counted, printable, some_of

CELL_CHARS_MAX = 300
NAMES_MAX = 5  # at most this many devices are named for one cause of failure
TEXTS_MAX = 5  # at most this many different messages of one error code are separate causes
_NUMBER = re.compile(r"\d+(?:\.\d+)*")
_LINE = threading.Lock()


def say(device: str, line: str) -> None:
    """Print a line of progress about one device, from any thread. `device` "" means all devices."""
    with _LINE:
        progress(f"[{device}] {line}" if device else line)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align rows in columns; the first row is the heading."""
    shown = [[printable(cell, CELL_CHARS_MAX, newlines=False) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
    return "\n".join(line.rstrip() for line in lines)


def error_lines(errors: Sequence[tuple[str, str, str]]) -> str:
    """Return a line for each error, to print below a table: device, code, message."""
    # Most messages already start with the device's name, which a line needs only once.
    return "".join(f"{name} [{code}]: {message.removeprefix(f'{name}: ')}\n" for name, code, message in errors)


def errors_by_cause(errors: Sequence[tuple[str, str, str]]) -> str:
    """Return a line for each cause: number of devices, code, first message, and first names.

    The code is the cause. Its messages are separate causes if they differ in more than the device's name, address or
    numbers, and if there are at most TEXTS_MAX of them. The most frequent cause is first.
    """
    by_code: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for name, code, message in errors:
        device_name = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])( \([^)]*\))?")
        text = _NUMBER.sub("#", device_name.sub("DEVICE", message))
        by_code.setdefault(code, {}).setdefault(text, []).append((name, message.removeprefix(f"{name}: ")))
    causes: list[tuple[str, list[tuple[str, str]]]] = []
    for code, texts in by_code.items():
        if len(texts) <= TEXTS_MAX:
            causes += [(f"[{code}]", failures) for failures in texts.values()]
        else:
            every = [failure for failures in texts.values() for failure in failures]
            causes.append((f"[{code}], with {len(texts)} different messages, such as", every))
    lines = []
    for cause, failures in sorted(causes, key=lambda each: -len(each[1])):
        names = some_of([name for name, _ in failures], NAMES_MAX)
        devices = counted(len(failures), "device")
        lines.append(f"{devices} {cause}: {failures[0][1]}\n  {names}\n")
    return "".join(lines)
