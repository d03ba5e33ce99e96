"""Typed JSON: a dataclass is read back unchanged, and the error of a wrong value names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import ConfigInvalid
from edgert.typed_json import (
    ENTRIES_MAX,
    FLAT,
    INTEGER_MAX,
    OMITTED,
    TEXT_LENGTH_MAX,
    Closed,
    Mistyped,
    UnknownKey,
    from_json,
    json_bytes,
    read_json,
    to_json,
)


class Colour(str, Enum):
    RED = "red"


@dataclass(frozen=True)
class Wheel:
    spokes: int

    def __post_init__(self) -> None:
        if self.spokes < 0:
            raise ConfigInvalid("fewer than 0 spokes")


@dataclass(frozen=True)
class Bell:
    name: str
    loud: bool


@dataclass(frozen=True)
class Lock(Closed):
    digits: int


@dataclass(frozen=True)
class Bike:
    name: str
    price: float
    colour: Colour
    wheels: tuple[Wheel, ...]
    gears: Mapping[int, tuple[int, float]]
    owner: str | None = None
    lock: int | None = field(default=None, metadata={OMITTED: True})
    bell: Bell | None = field(default=None, metadata={FLAT: True})


@dataclass(frozen=True)
class Rack:
    locks: tuple[Lock, ...]


BIKE = Bike("b", 1.5, Colour.RED, (Wheel(32), Wheel(36)), {1: (2, 0.5)}, bell=Bell("b", True))
VALUE: dict[str, Any] = to_json(BIKE)


def test_a_file_that_is_missing_or_damaged_has_no_value(tmp_path: Path) -> None:
    path = tmp_path / "wheel.json"
    assert read_json(Wheel, path) is None
    path.write_bytes(json_bytes(Wheel(3)))
    assert read_json(Wheel, path) == Wheel(3)
    for damaged in ("", "{", "[]", '{"spokes": "3"}', '{"spokes": -1}', "[" * 100_000, "\xff"):
        path.write_bytes(damaged.encode("latin-1"))
        assert read_json(Wheel, path) is None


def test_a_value_is_equal_after_the_way_through_json() -> None:
    assert from_json(Bike, json.loads(json.dumps(VALUE))) == BIKE
    assert VALUE["loud"] is True, "the fields of a flat one are beside the others"
    silent = replace(BIKE, bell=None)
    assert from_json(Bike, to_json(silent)) == silent, "a name that both have is the bike's"


def test_a_field_that_is_none_may_have_no_key() -> None:
    assert "lock" not in VALUE
    locked = replace(BIKE, lock=4711)
    assert to_json(locked)["lock"] == 4711
    assert from_json(Bike, to_json(locked)) == locked


def test_defaults_replace_missing_keys_and_unknown_keys_are_ignored() -> None:
    least = {key: VALUE[key] for key in ("name", "price", "colour", "wheels", "gears")}
    bike = from_json(Bike, {**least, "basket": {"deep": [1]}})
    assert (bike.owner, bike.bell) == (None, None)


def test_the_error_about_an_unknown_key_of_a_closed_class_lists_the_known_keys() -> None:
    with pytest.raises(UnknownKey, match=r"locks\[0\] has an unknown key 'colour'; known: digits"):
        from_json(Rack, {"locks": [{"digits": 4, "colour": "red"}]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 1}, "name is 1, not of type str"),
        ({"name": "x" * (TEXT_LENGTH_MAX + 1)}, "name has 65537 entries"),
        ({"price": "1"}, "price is '1'"),
        ({"price": True}, "price is True"),
        ({"price": float("nan")}, "price is not a finite number"),
        ({"price": 10**400}, "price is not a finite number"),
        ({"colour": "green"}, "colour is 'green'"),
        ({"wheels": None}, "wheels is None, not a list"),
        ({"wheels": [{"spokes": 1.5}]}, r"wheels\[0\].spokes is 1.5"),
        ({"wheels": [{"spokes": INTEGER_MAX + 1}]}, r"wheels\[0\].spokes is beyond"),
        ({"wheels": [{}]}, r"wheels\[0\] lacks 'spokes'"),
        ({"wheels": [{"spokes": -1}]}, "fewer than 0 spokes"),
        ({"wheels": [{"spokes": 1}] * (ENTRIES_MAX + 1)}, f"wheels has {ENTRIES_MAX + 1} entries"),
        ({"gears": {"one": [1, 1.0]}}, "gears has the key 'one'"),
        ({"gears": {"1": [1]}}, "gears.1 has 1 entries, not 2"),
        ({"owner": 5}, "owner is 5"),
        ({"loud": "yes"}, "loud is 'yes'"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Mistyped, match=words):
        from_json(Bike, {**VALUE, **change})


def test_json_that_is_too_deep_or_is_no_object_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, {**VALUE, "name": deep}, 5, None):
        with pytest.raises(Mistyped):
            from_json(Bike, value)
    while deep:  # the interpreter must not free it recursively
        deep = deep.pop()
