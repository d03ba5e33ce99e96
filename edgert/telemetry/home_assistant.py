"""Discovery by Home Assistant: a message that makes a device and its models appear in Home Assistant.

A device has one retained message (https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload, Home
Assistant 2024.12 and later). Home Assistant reads the values from the topics that the device publishes anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgert.telemetry.messages import Topics

STALE_WINDOWS = 2.5  # a value is unavailable after this many windows without a report

# The sensors of each model: key in `metrics`, name, unit, device class, state class
_OF_MODEL: tuple[tuple[str, str, str | None, str | None, str | None], ...] = (
    ("lat_p50_ms", "latency p50", "ms", "duration", "measurement"),
    ("lat_p99_ms", "latency p99", "ms", "duration", "measurement"),
    ("req_total", "requests", None, None, "total_increasing"),
    ("err_total", "errors", None, None, "total_increasing"),
    ("alarms", "alarms", None, None, "measurement"),
    ("model_version", "version", None, None, None),
)
_OF_DEVICE: tuple[tuple[str, str, str | None, str | None, str | None], ...] = (
    ("temp_c", "temperature", "°C", "temperature", "measurement"),
    ("load_1m", "load", None, None, "measurement"),
    ("mem_available_bytes", "memory available", "B", "data_size", "measurement"),
    ("spool_rows", "reports waiting", None, None, "measurement"),
)


def discovery(
    topics: Topics, prefix: str, models: Sequence[str], info: Mapping[str, object], window_s: float
) -> tuple[str, bytes]:
    """Return the topic and the payload to publish, retained.

    A model that is no longer in `models` disappears from Home Assistant.

    Args:
        prefix: Home Assistant's discovery prefix, usually `homeassistant`.
        info: The device's `info` message, for profile and version.
        window_s: The length of a window, after which values become unavailable.
    """
    node = node_id(topics)
    # A device `b_c` with a model `d` must differ from a device `b` with a model `c_d`.
    between = "/" if "_" in _device_part(topics) else "_"
    expire_s = round(STALE_WINDOWS * window_s)
    components: dict[str, Any] = {}
    for model in models:
        for key, name, unit, kind, state in _OF_MODEL:
            component = _sensor(topics.metrics(model), key, f"{model} {name}", unit, kind, state, expire_s)
            components[f"{model}_{key}"] = component
    for key, name, unit, kind, state in _OF_DEVICE:
        components[key] = _sensor(topics.sys, key, name, unit, kind, state, expire_s)
    for key, component in components.items():
        component["unique_id"] = f"{node}{between}{key}"
    payload = {
        "device": {
            "identifiers": [node],
            "name": topics.device,
            "manufacturer": "EdgeRT",
            "model": str(info.get("profile", "device")),
            "sw_version": str(info.get("edgert", "")),
            "suggested_area": topics.site,
        },
        "origin": {"name": "EdgeRT"},
        "availability_topic": topics.status,
        # The broker publishes `lost` for a device that disappeared.
        "availability_template": "{{ 'online' if value == 'online' else 'offline' }}",
        "components": components,
        "qos": 0,
    }
    return discovery_topic(topics, prefix), json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()


def discovery_topic(topics: Topics, prefix: str) -> str:
    """Return the topic of the discovery message. `prefix` may be a wildcard."""
    return f"{prefix}/device/{node_id(topics)}/config"


def node_id(topics: Topics) -> str:
    """Return the device's unique id in Home Assistant, which contains only `A-Z a-z 0-9 _ -`.

    The first `_` before a letter or a digit separates site and device. So every `_` of a site is doubled. A `_` of a
    device is doubled if no letter or digit follows. A `.` becomes `_-`. Most names stay unchanged, because a broker's
    access list with `%u` depends on the name.
    """
    site = topics.site.replace("_", "__").replace(".", "_-")
    return f"edgert_{site}_{_device_part(topics)}"


def _device_part(topics: Topics) -> str:
    return re.sub(r"_(?![A-Za-z0-9])", "__", topics.device).replace(".", "_-")


def _sensor(
    topic: str, key: str, name: str, unit: str | None, kind: str | None, state: str | None, expire_s: int
) -> dict[str, Any]:
    fields = {
        "platform": "sensor",
        "name": name,
        "state_topic": topic,
        # A window without the field gives None, which is "unknown" in Home Assistant.
        "value_template": f"{{{{ value_json.get('{key}') }}}}",
        "unit_of_measurement": unit,
        "device_class": kind,
        "state_class": state,
        "expire_after": expire_s,
    }
    return {field: value for field, value in fields.items() if value is not None}
