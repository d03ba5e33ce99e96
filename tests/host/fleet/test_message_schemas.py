"""The check of a message's fields agrees with a validator of JSON Schema."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from edgert.errors import ProtocolError
from edgert_deploy.fleet.message_schemas import check

KINDS = ("info", "sys", "deploy", "event", "metrics", "hist")
VALUES: tuple[Any, ...] = (0, 1, -1, 0.5, 1.0, 2, 1e300, 2**53, 2**63, "", "a", "r7", "-a", "a b", "é", "x" * 65, "x" * 501, True, False, None)  # fmt: skip


def allows(kind: str, fields: dict[str, Any]) -> bool:
    try:
        check(kind, fields)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_accepts_the_same_values_as_the_schema(kind: str) -> None:
    schema = json.loads((files("edgert.telemetry") / "schemas" / f"{kind}.json").read_text())
    del schema["required"]  # messages of another version may lack fields
    validator = Draft202012Validator(schema)
    for name in (*schema["properties"], "digits_state", "digits_alarms", "a_field_of_later"):
        for value in VALUES:
            assert allows(kind, {name: value}) == validator.is_valid({name: value}), (name, value)


def test_an_id_with_a_newline_at_its_end_is_refused() -> None:
    assert allows("hist", {"model_version": "r7"})
    assert not allows("hist", {"model_version": "r7\n"})


def test_numbers_that_json_does_not_have_are_refused() -> None:
    for value in (math.nan, math.inf, -math.inf):
        for name in ("req_total", "lat_p99_ms", "temp_c", "a_field_of_later"):
            assert not allows("metrics", {name: value})
