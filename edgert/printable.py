"""Text for a terminal: foreign text without control characters, endpoints, counts, and short errors."""

from __future__ import annotations

import errno
import unicodedata
from collections.abc import Sequence

CHARS_MAX = 1_000_000
ERROR_CHARS_MAX = 300
# Format characters that reorder or hide text. Joiners, which shape letters, are allowed.
_HIDDEN = frozenset("\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff")
_REPLACEMENT = "\ufffd"
_ADVICE = {
    errno.EACCES: "run this as the owner, or as root",
    errno.EPERM: "check the owner and `lsattr`, and that the file system has modes and sockets, as ext4 has, but FAT has not",
    errno.ENOSPC: "free some space",
    errno.EROFS: "replace the storage if it is worn out, or mount it with write access",
    errno.EIO: "the storage is faulty: replace it",
}


def printable(text: str, chars_max: int = CHARS_MAX, *, newlines: bool = True) -> str:
    """Return at most `chars_max` characters of `text`, without characters that control a terminal.

    Escapes, other control characters, bidirectional overrides and lone surrogates become U+FFFD; line breaks and tabs
    stay if `newlines` allows them.
    """
    if len(text) > chars_max:
        text = f"{text[:chars_max]}... ({len(text) - chars_max} more characters)"
    if text.isascii() and text.isprintable():
        return text
    kept = "\n\t" if newlines else ""
    return "".join(c if c in kept or not _controls(c) else _REPLACEMENT for c in text)


def endpoint(host: str, port: int) -> str:
    """Return `host:1883` or `[::1]:1883`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def counted(number: int, noun: str) -> str:
    """Return `1 sample` or `2 samples`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, and how many more there are; `none` for none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"


def in_short(error: BaseException) -> str:
    """Return the type of an error from third-party code, and its message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:ERROR_CHARS_MAX]}"


def reason_of(error: OSError) -> str:
    """Return the reason of the system, and the next step if it is known."""
    reason, advice = error.strerror or str(error), _ADVICE.get(error.errno or 0)
    return f"{reason}; {advice}" if advice else reason


def file_error(error: OSError, otherwise: str = "") -> str:
    """Return `FILE: reason`. If the error names no file, return `otherwise: reason`, or the reason alone."""
    name = error.filename or otherwise
    return f"{name}: {reason_of(error)}" if name else reason_of(error)


def _controls(character: str) -> bool:
    # Cc: control, Cs: surrogate, Zl and Zp: line and paragraph separators.
    return character in _HIDDEN or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
