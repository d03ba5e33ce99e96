"""The answers of a real server match the OpenAPI file. A field that is not in the file fails the test."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from edgert.errors import ErrorText
from edgert.telemetry import messages
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.ui.access import Access
from edgert_deploy.fleet.ui.answers import Answers
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.live_views import LiveViews
from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.fleet.ui.server import PageServer
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.rollout_store import RolloutStore
from tests.support.devices import WAIT_S_MAX
from tests.support.fleet import NOW_MS, Pi, Sent, Watched, record, tell
from tests.support.needed import needed
from tests.support.rollouts import ROLLOUT

NOW = 1000.0  # monotonic seconds


def a_day() -> Sent:
    """Two devices, two versions: stages, an alarm, a missing report, an event, an unsynchronized clock."""
    one, two, unsure = Pi("pi-1"), Pi("pi-2", version="r2"), Pi("pi-3")
    sent = (
        one.info()
        + two.info("stable")
        + one.deploy(NOW_MS, "p99_ms")
        + two.rolled_back(3, "p99_ms is 9 ms", NOW_MS - 5)
    )
    for minute in range(5, 0, -1):
        hist, (topic, payload) = one.window(
            NOW_MS - minute * MINUTE_MS, [1.0, 2.0] * 20, errors=1, decode=[0.0] * 40, engine=[0.9, 1.9] * 20
        )
        figures = {"lat_p50_ms": 1.0, "lat_p99_ms": 2.0, "batch_mean": 1.0, "rss_bytes": 9}
        sent += [hist, (topic, messages.dump(json.loads(payload) | figures))]
        reports = two.window(NOW_MS - minute * MINUTE_MS, [3.0] * 30)
        sent += [] if minute == 3 else reports
    sent += unsure.window(NOW_MS - MINUTE_MS, [4.0], clock_synced=0)
    crashed = {"event": "crashed", "model": "digits", "model_version": "r1", "reason": "signal 11"}
    fields = messages.envelope(ts_ms=NOW_MS - 5, boot="b1", seq=1) | crashed
    return [*sent, (one.topics.event, messages.dump(fields))]


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    url, fleet_state, store = str(tmp_path / "fleet.db"), Watched(), RolloutStore(tmp_path / "rollouts")
    assert record(url, a_day()).refused == 0
    tell(fleet_state, a_day(), NOW)
    outcomes = {"pi-1": Outcome("pi-1", Result.FAILED, error=ErrorText("x.y", "no"))}
    devices = ("pi-1", "pi-2")
    store.write(replace(ROLLOUT, id="digits-1", model="digits", release=7, devices=devices, outcomes=outcomes))
    query = FleetQuery(url)
    live_views = LiveViews(fleet_state, Rollouts(store), lambda: NOW, lambda: NOW_MS)
    live_views.tick()
    answers = Answers(live_views, History(query, lambda: NOW_MS, targets={"digits": 2.5}))
    server = PageServer(answers, Access(frozenset()), "127.0.0.1", 0)
    yield server.port
    server.close()
    live_views.close()
    query.close()


def get(port: int, path: str) -> tuple[int, str, Any]:
    """Return the status, the type and the value of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S_MAX)
    connection.request("GET", f"/api/v1/{path}")
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    kind = (answer.getheader("Content-Type") or "").partition(";")[0]
    return answer.status, kind, json.loads(body) if kind == "application/json" else body


def tight(value: Any) -> Any:
    """Return a schema that forbids fields that it does not list, unless it allows them explicitly."""
    if isinstance(value, list):
        return [tight(each) for each in value]
    if not isinstance(value, dict):
        return value
    closed = {"additionalProperties": False} if value.get("type") == "object" and "properties" in value else {}
    return closed | {key: tight(each) for key, each in value.items()}


def test_the_openapi_file_is_valid_and_has_the_addresses_of_the_server(port: int) -> None:
    status, kind, said = get(port, "openapi.json")
    assert (status, kind) == (200, "application/json")
    needed("openapi_spec_validator").validate(said)
    _, _, refusal = get(port, "nothing")
    known = refusal["error"]["message"].partition("known: ")[2].split(", ")
    assert {path.strip("/") for path in said["paths"]} == set(known)


@pytest.mark.parametrize(
    "asked",
    [
        "latency", "latency?device=pi-1&period=24h", "breakdown", "breakdown?by=site&limit=1", "stages", "query",
        "query?by=&step=15m&percentiles=50,99.9&buckets=1", "query?by=site,device,model,version,profile",
        "query?by=model&stages=1&buckets=1&step=15m", "events",
        "events?event=crashed", "devices", "devices?state=attention&sort=p99", "device?site=plant-a&device=pi-1", "rollouts",
        "channels",
    ],
)  # fmt: skip
def test_an_answer_fits_the_openapi_file(port: int, asked: str) -> None:
    _, _, said = get(port, "openapi.json")
    path, _, words = asked.partition("?")
    operation = said["paths"][f"/{path}"]["get"]
    content = operation["responses"]["200"]["content"]
    schema = tight({**content["application/json"]["schema"], "components": said["components"]})
    status, _, answer = get(port, asked)
    assert status == 200
    assert [error.message for error in Draft202012Validator(schema).iter_errors(answer)] == []
    assert any(answer.values()), "an empty answer proves nothing"
    named = {said["components"]["parameters"][each["$ref"].rpartition("/")[2]]["name"] if "$ref" in each else each["name"]
             for each in operation["parameters"]}  # fmt: skip
    assert set(re.findall(r"(\w+)=", words)) <= named
    if "text/csv" in content:
        status, kind, _ = get(port, f"{asked}{'&' if words else '?'}format=csv")
        assert (status, kind) == (200, "text/csv")


@pytest.mark.parametrize(
    "asked", ["latency?period=1s", "device?site=a&device=b", "device", "query?by=colour", "devices?format=xml"]
)
def test_a_refusal_fits_the_openapi_file(port: int, asked: str) -> None:
    _, _, said = get(port, "openapi.json")
    schema = tight({**said["components"]["schemas"]["Error"], "components": said["components"]})
    status, _, answer = get(port, asked)
    assert status in (400, 404)
    assert [error.message for error in Draft202012Validator(schema).iter_errors(answer)] == []
