"""Checks the fields of a message against the JSON Schema of its kind (edgert/telemetry/schemas).

The schemas are flat, so one rule for each field is enough. The check of a message takes a few microseconds. A device
may have another version of EdgeRT, so the check accepts a message that lacks a required field. The code that needs
this field then refuses the message.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from edgert.errors import ProtocolError
from edgert.telemetry.messages import Scalar

_TYPES = {"string": (str,), "number": (int, float), "integer": (int, float)}
_KEYWORDS = frozenset(
    ("type", "minimum", "maximum", "minLength", "maxLength", "pattern", "enum", "const", "description", "$comment")
)


@dataclass(frozen=True)
class _Rule:
    """The limits of one field. `low` and `high` limit the length of a text or the value of a number."""

    types: tuple[type, ...]
    low: float
    high: float
    is_integer: bool
    values: tuple[Scalar, ...]
    pattern: re.Pattern[str] | None

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> _Rule:
        assert _KEYWORDS.issuperset(schema), f"{sorted(schema)} has a keyword that is not checked"
        pattern = schema.get("pattern")
        assert pattern is None or (pattern[0], pattern[-1]) == ("^", "$"), f"{pattern} is not about the whole text"
        text = schema["type"] == "string"
        return cls(
            types=_TYPES[schema["type"]],
            low=schema.get("minLength" if text else "minimum", -math.inf),
            high=schema.get("maxLength" if text else "maximum", math.inf),
            is_integer=schema["type"] == "integer",
            values=(schema["const"],) if "const" in schema else tuple(schema.get("enum", ())),
            pattern=None if pattern is None else re.compile(pattern),
        )

    def holds(self, value: Scalar) -> bool:
        if type(value) not in self.types or (self.values and value not in self.values):
            return False
        if isinstance(value, str):
            return self.low <= len(value) <= self.high and (self.pattern is None or bool(self.pattern.fullmatch(value)))
        return math.isfinite(value) and self.low <= value <= self.high and (not self.is_integer or value == int(value))


_ANY = tuple(_Rule.of({"type": kind}) for kind in ("string", "number"))


def check(kind: str, fields: Mapping[str, Scalar]) -> None:
    """Raise ProtocolError for the first field that breaks the schema of `kind`."""
    rules, patterns = _rules(kind)
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is not None:
            good = rule.holds(value)
        else:
            schemas = [each for pattern, each in patterns if pattern.search(name)]
            good = all(each.holds(value) for each in schemas) if schemas else any(each.holds(value) for each in _ANY)
        if not good:
            raise ProtocolError(f"{name[:80]} is {value!r:.80}, which docs/telemetry.md does not allow in {kind!r}")


@cache
def _rules(kind: str) -> tuple[dict[str, _Rule], list[tuple[re.Pattern[str], _Rule]]]:
    schema = json.loads((files("edgert.telemetry") / "schemas" / f"{kind}.json").read_text())
    patterns = [(re.compile(name), _Rule.of(rule)) for name, rule in schema.get("patternProperties", {}).items()]
    return {name: _Rule.of(rule) for name, rule in schema["properties"].items()}, patterns
