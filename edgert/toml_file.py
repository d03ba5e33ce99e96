"""TOML files and their tables as dataclasses. Each fault is a ConfigInvalid that names file and key."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from edgert.errors import BundleError, ConfigInvalid
from edgert.typed_json import Mistyped, from_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_BYTES_MAX = 64 * 1024

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of the file `path`, of at most FILE_BYTES_MAX. Raises ConfigInvalid."""
    return parse_toml(read_text(path, FILE_BYTES_MAX), str(path))


def read_text(path: Path, bytes_max: int) -> str:
    """Return the text in the file `path`, or in the pipe of a shell's `<(command)`. Raises ConfigInvalid."""
    try:
        refuse_pipe(path)
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise ConfigInvalid(f"{path} is too large; the limit is {bytes_max} bytes: give another file")
        return data.decode("utf-8-sig")  # editors on Windows write a byte order mark
    except FileNotFoundError as error:
        raise ConfigInvalid(f"there is no {path}: check the name") from error
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"{path} is not UTF-8 text: save it as such, or give another file") from error


def refuse_pipe(path: Path) -> None:
    """Raise ConfigInvalid for a named pipe or a device, because a read of it may not end."""
    if problem := pipe_problem(Path(os.path.realpath(path))):  # the real path of `<(command)` may not exist
        raise ConfigInvalid(problem)


def pipe_problem(path: Path) -> str:
    """Return a message if `path` is a named pipe or a device; otherwise an empty text."""
    is_special = path.exists() and not (path.is_file() or path.is_dir())
    return f"{path} is a named pipe or a device: use a regular file instead" if is_special else ""


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the content of `text`; `where` names it in errors. Raises ConfigInvalid."""
    try:
        value: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{where} is not TOML: {error}") from error
    return value


def from_table(cls: type[T], table: Any, where: str) -> T:
    """Return a table as dataclass `cls`; `where` names the table in errors. Raises ConfigInvalid."""
    if not isinstance(table, dict):
        raise ConfigInvalid(f"{where} must be a table, got {table!r}")
    try:
        return from_json(cls, table)
    except Mistyped as error:
        raise ConfigInvalid(f"{where}: {error}") from error


@contextmanager
def about(where: object) -> Iterator[None]:
    """Replace a ConfigInvalid or a BundleError by a ConfigInvalid with `where` before the message."""
    try:
        yield
    except (ConfigInvalid, BundleError) as error:
        raise ConfigInvalid(f"{where}: {error.message}") from error
