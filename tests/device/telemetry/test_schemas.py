"""The shipped schemas describe the messages of a real daemon, and are in the documentation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from edgert.telemetry.messages import DEVICE_KINDS, MODEL_KINDS, parse_topic
from edgert.telemetry.mqtt import Connection
from tests.support.clients import ITEM
from tests.support.devices import a_device, wait_until
from tests.support.paths import ROOT
from tests.support.servers.brokers import Broker

KINDS = (*DEVICE_KINDS, *MODEL_KINDS)
DOCUMENT = ROOT / "docs" / "telemetry.md"


def schema(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("edgert.telemetry") / "schemas" / f"{kind}.json").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_schema_is_a_valid_schema_and_describes_every_field(kind: str) -> None:
    Draft202012Validator.check_schema(schema(kind))
    for name, field in schema(kind).get("properties", {}).items():
        assert len(field["description"]) > 10, name
        assert field["type"] in ("string", "number", "integer"), "payloads are flat"


AJV = "ajv@8.17.1"
COMPILE = """
const Ajv = require("ajv/dist/2020"), said = JSON.parse(require("fs").readFileSync(0)), wrong = [];
for (const [name, {schema, good, bad}] of Object.entries(said)) {
    const fits = new Ajv({strict: true, strictTypes: true, strictTuples: true, strictRequired: true}).compile(schema);
    if (!fits(good)) wrong.push([name, good, fits.errors]);
    if (fits(bad)) wrong.push([name, bad]);
}
console.log(JSON.stringify(wrong));
"""


@pytest.fixture(scope="module")
def ajv() -> Path:
    """Return a folder with ajv, which later test runs reuse."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed: apt-get install npm")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgert-test" / AJV
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / "ajv").exists():
        done = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", AJV], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"{AJV} cannot be installed here: {done.stderr.strip()[-200:]}")
    return folder


def test_every_schema_loads_in_ajv_in_its_strictest_mode(ajv: Path) -> None:
    said: dict[str, dict[str, Any]] = {"status": {"schema": schema("status"), "good": "online", "bad": "asleep"}}
    for kind in KINDS:
        if kind != "status":
            good = {name: example(field) for name, field in schema(kind)["properties"].items()} | {"added_later": "x"}
            said[kind] = {"schema": schema(kind), "good": good, "bad": good | {"nested": {"a": 1}}}
    done = subprocess.run(["node", "-e", COMPILE], cwd=ajv, input=json.dumps(said), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_schemas_describe_the_messages_of_a_real_daemon(tmp_path: Path) -> None:
    heard: list[tuple[str, bytes]] = []
    with Broker.in_folder(tmp_path / "broker") as broker:
        connection = Connection(broker.settings, on_message=lambda topic, payload, _: heard.append((topic, payload)))
        connection.open()
        connection.subscribe(("edgert/v1/#",), 1)
        mqtt = f'[serving]\nwindow_s = 0.5\n[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n'
        with a_device(mqtt) as device:
            device.put()
            with device.client() as client:
                for i in range(30):
                    client.infer("echo", ITEM * i)

            def arrived() -> bool:
                connection.pump(0.1)
                return {parse_topic(topic).kind for topic, _ in heard} == set(KINDS) and any(b'"count":30' in body or b'"req_total":3' in body for _, body in heard)  # fmt: skip

            wait_until(arrived, "every kind of message arrives")
        connection.pump(0.5)
        connection.close()
    validators = {kind: Draft202012Validator(schema(kind)) for kind in KINDS}
    for topic, payload in heard:
        kind = parse_topic(topic).kind
        value = payload.decode() if kind == "status" else json.loads(payload)
        errors = [error.message for error in validators[kind].iter_errors(value)]
        assert errors == [], f"{topic}: {payload!r}"
        if kind != "status":
            known = schema(kind)
            patterns = known.get("patternProperties", {})
            unknown = [name for name in value if name not in known["properties"] and not any(re.search(p, name) for p in patterns)]  # fmt: skip
            assert unknown == [], f"{topic} holds fields that no schema and no page tells of"


@pytest.mark.parametrize(
    ("kind", "spoilt"),
    [
        ("hist", {"buckets": "3:0"}),
        ("hist", {"scale": 6}),
        ("hist", {"extra": [1]}),
        ("metrics", {"req_total": -1}),
        ("metrics", {"up": 2}),
        ("event", {"boot": ""}),
    ],
)
def test_a_schema_refuses_what_the_contract_does_not_allow(kind: str, spoilt: dict[str, Any]) -> None:
    validator = Draft202012Validator(schema(kind))
    fields = {name: example(field) for name, field in schema(kind)["properties"].items()}
    assert list(validator.iter_errors(fields | {"added_later": 1.5})) == []
    assert list(validator.iter_errors(fields | spoilt))


def example(field: dict[str, Any]) -> object:
    if field["type"] != "string":
        return field.get("const", 1)
    return field.get("const", "3:1,7:2" if "pattern" in field and ":" in field["pattern"] else "b1")


def test_the_documentation_includes_every_schema() -> None:
    text = DOCUMENT.read_text()
    assert [kind for kind in KINDS if kind != "status" and f"schemas/{kind}.json" not in text] == []
