"""Dataclasses to JSON values and back. Each value is checked against the type of its field.

The sender is another process or another machine, so its values are not trusted. Texts, lists and numbers have limits,
and the types of the fields limit the depth. A key without a field is ignored, because a newer sender may add keys. For
a `Closed` dataclass, such a key is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from edgert.errors import EdgeRTError

TEXT_LENGTH_MAX = 64 * 1024
ENTRIES_MAX = 100_000  # entries of a list or an object; a model may have as many labels
INTEGER_MAX = 2**63 - 1
# The metadata of a field that holds a dataclass or None. In JSON, the fields of this dataclass are on the level of the
# outer fields.
FLAT = "flat"
# The metadata of a field for which JSON has no key while the field is None.
OMITTED = "omitted"

T = TypeVar("T")
Reader = Callable[[Any, str], Any]  # arguments: a JSON value and its place; raises Mistyped


class Mistyped(ValueError):
    """A JSON value does not have the type of its field; the message names the field."""


class UnknownKey(Mistyped):
    """A `Closed` dataclass has no field for a key."""


class Closed:
    """A dataclass without unknown keys: people write the JSON, or an ignored key would change a result."""


def to_json(value: Any) -> Any:
    """Return `value`, a dataclass or a value of a field, as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        entries: dict[str, Any] = {}
        for field in fields(value):
            entry = to_json(getattr(value, field.name))
            if entry is None and OMITTED in field.metadata:
                continue
            entries |= (entry or {}) if FLAT in field.metadata else {field.name: entry}
        return entries
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(entry) for entry in value]
    return value


def from_json(cls: type[T], value: Any) -> T:
    """Return a dataclass `cls` with the given JSON values. Raises Mistyped."""
    instance: T = _dataclass(cls, value, "")
    return instance


def read_json(cls: type[T], path: Path) -> T | None:
    """Return the dataclass `cls` in the JSON file `path`; None if the file is missing or damaged."""
    try:
        return from_json(cls, json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):  # Mistyped is a ValueError
        return None


def json_bytes(value: Any) -> bytes:
    """Return `value`, an argument of `to_json`, as the content of a JSON file."""
    return json.dumps(to_json(value)).encode()


@cache
def _reader(wanted: Any) -> Reader:
    """Return the function that reads values of the type `wanted`; analyse each type once."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        (kind,) = (each for each in arguments if each is not type(None))
        return partial(_optional, _reader(kind))
    if origin is tuple:
        return partial(_tuple, tuple(each if each is ... else _reader(each) for each in arguments))
    if origin is not None:
        return partial(_mapping, arguments[0], _reader(arguments[1]))
    return partial(_dataclass if is_dataclass(wanted) else _plain, wanted)


def _optional(read: Reader, value: Any, where: str) -> Any:
    return None if value is None else read(value, where)


def _mapping(key_kind: Any, read: Reader, value: Any, where: str) -> dict[Any, Any]:
    return {
        _key(key_kind, key, where): read(entry, f"{where}.{key[:80]}")
        for key, entry in _bounded(value, dict, where, "an object").items()
    }


def _dataclass(cls: Any, value: Any, where: str) -> Any:
    entries = _bounded(value, dict, where, "an object")
    values, known = {}, _fields(cls)
    if issubclass(cls, Closed) and (unknown := sorted(set(entries) - set(known))):
        raise UnknownKey(f"{_field_text(where)} has an unknown key {unknown[0][:80]!r}; known: {', '.join(known)}")
    for name, (read, required, holder) in known.items():
        if holder is not None:
            values[name] = read(entries if _has(holder, entries, known) else None, where)
        elif name in entries:
            values[name] = read(entries[name], f"{where}.{name}")
        elif required:
            raise Mistyped(f"{_field_text(where)} lacks {name!r}")
    try:
        return cls(**values)
    except EdgeRTError as error:  # the class checks its values
        raise Mistyped(f"{_field_text(where)}: {error.message}" if where else error.message) from error


@cache
def _fields(cls: Any) -> dict[str, tuple[Reader, bool, Any]]:
    """Return each field's reader, whether it is required, and its type if it is `FLAT`, else None."""
    kinds = get_type_hints(cls)
    return {
        field.name: (
            _reader(kinds[field.name]),
            field.default is MISSING and field.default_factory is MISSING,
            kinds[field.name] if FLAT in field.metadata else None,
        )
        for field in fields(cls)
    }


def _has(kind: Any, entries: Mapping[str, Any], own: Container[str]) -> bool:
    """Return whether `entries` has a value for a required field of the optional dataclass `kind`.

    `own` are the fields of the outer dataclass. The function ignores fields with a name in `own`, because their values
    belong to the outer dataclass.
    """
    (cls,) = (each for each in get_args(kind) if each is not type(None))
    return any(required and name in entries and name not in own for name, (_, required, _) in _fields(cls).items())


def _tuple(readers: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    entries = _bounded(list(value) if isinstance(value, tuple) else value, list, where, "a list")
    if readers[1:] == (...,):
        readers = readers[:1] * len(entries)
    if len(readers) != len(entries):
        raise Mistyped(f"{_field_text(where)} has {len(entries)} entries, not {len(readers)}")
    return tuple(read(entry, f"{where}[{i}]") for i, (read, entry) in enumerate(zip(readers, entries, strict=True)))


def _key(kind: type, key: str, where: str) -> Any:
    if kind is str:
        return key
    try:
        return int(key[:20])
    except ValueError as error:
        raise Mistyped(f"{_field_text(where)} has the key {key[:80]!r}, not a number") from error


def _plain(kind: type, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if (isinstance(value, int) and abs(value) > INTEGER_MAX) or not math.isfinite(value):
            raise Mistyped(f"{_field_text(where)} is not a finite number")
        return float(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > INTEGER_MAX:
            raise Mistyped(f"{_field_text(where)} is beyond {INTEGER_MAX}")
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if issubclass(kind, str) and isinstance(value, str):
        text = _bounded(value, str, where, "a text")
        try:
            return kind(text)  # a member, if `kind` is an Enum
        except ValueError as error:
            raise Mistyped(f"{_field_text(where)} is {text[:80]!r}") from error
    raise Mistyped(f"{_field_text(where)} is {_excerpt(value)}, not of type {kind.__name__}")


def _bounded(value: Any, kind: type[Any], where: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise Mistyped(f"{_field_text(where)} is {_excerpt(value)}, not {name}")
    size, most = len(value), TEXT_LENGTH_MAX if kind is str else ENTRIES_MAX
    if size > most:
        raise Mistyped(f"{_field_text(where)} has {size} entries; at most {most} are read")
    return value


def _field_text(where: str) -> str:
    return where.removeprefix(".") or "it"


def _excerpt(value: Any) -> str:
    """Return a scalar as text. For other values, which may be large or deep, return the type."""
    if isinstance(value, str):
        return repr(value[:80])
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) <= INTEGER_MAX):
        return repr(value)
    return f"of type {type(value).__name__}"
