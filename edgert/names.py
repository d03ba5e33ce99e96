"""Rules for ids that are used as levels of MQTT topics, labels of exporters and file names."""

from __future__ import annotations

import re

from edgert.errors import ConfigInvalid

ID_CHARS_MAX = 64
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")  # the names of models, devices and groups
RUNTIME = "edgert.runtime"  # the runtime in the model field of a channel and of telemetry; model names have no dot
CHANNEL_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")  # a part of a registry's tag
# The rules of NAME and CHANNEL_NAME as text, for messages.
NAME_RULE = "use one of a-z, then at most 62 of a-z 0-9 _ -"
CHANNEL_NAME_RULE = "use one of a-z, then at most 39 of a-z 0-9 -"


def check_model_name(name: str) -> None:
    """Raise ConfigInvalid if `name` cannot be the name of a model."""
    if not NAME.fullmatch(name):
        raise ConfigInvalid(f"{name[:80]!r} is not a model name: {NAME_RULE}")


def checked_id(what: str, value: str) -> str:
    """Return `value` if it can be one level of a topic and an exporter's label. Raises ConfigInvalid."""
    if len(value) > ID_CHARS_MAX or not ID.match(value):
        raise ConfigInvalid(
            f"{what} id {value[:80]!r} cannot be part of an MQTT topic; use 1 to {ID_CHARS_MAX} of "
            "A-Z a-z 0-9 . _ - and start with a letter or a digit"
        )
    if _looks_numeric(value):
        raise ConfigInvalid(
            f"{what} id {value!r} reads as a number and exporters would change it; "
            f"put a letter in front: '{what[0]}{value}'"
        )
    return value


def _looks_numeric(value: str) -> bool:
    # float() also accepts `inf`, `nan` and `1_000`; int(..., 0) accepts 0x10.
    for read in (float, lambda text: int(text, 0)):
        try:
            read(value)
        except ValueError:
            continue
        return True
    return False
