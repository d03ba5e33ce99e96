"""perf_analyzer, unmodified, measures a daemon with its default configuration."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.devices import Device, a_device, http_port, wait_until
from tests.support.servers.perf_analyzer import PerfAnalyzer

REQUESTS = 200


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> PerfAnalyzer:
    tool = PerfAnalyzer(tmp_path_factory.mktemp("perf"))
    if tool.problem:
        pytest.skip(tool.problem)
    return tool


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with a_device('[http]\nlisten = "127.0.0.1:0"\n') as device:
        device.put()
        yield device


def statistics(device: Device) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port(device)}/v2/models/echo/stats") as answer:
        (found,) = json.load(answer)["model_stats"]
    return dict(found)


@pytest.mark.parametrize("protocol", [[], ["--concurrency-range", "4"]])
def test_perf_analyzer_measures_a_model_with_the_default_configuration(
    tool: PerfAnalyzer, device: Device, protocol: list[str]
) -> None:
    before = statistics(device)["inference_stats"]
    printed = tool.run(
        "-m", "echo", "-u", f"127.0.0.1:{http_port(device)}", "--request-count", str(REQUESTS), "--input-data", "random", *protocol
    )  # fmt: skip
    found = re.search(r"Request count: (\d+)", printed)
    assert found, printed
    assert int(found[1]) >= REQUESTS
    asked = before["success"]["count"] + REQUESTS  # an answer is counted once it is sent
    wait_until(lambda: statistics(device)["inference_stats"]["success"]["count"] >= asked, "every answer is counted")
    after = statistics(device)["inference_stats"]
    # perf_analyzer repeats its inputs, so that most answers come from the cache.
    for name in ("success", "queue"):
        assert after[name]["count"] - before[name]["count"] >= REQUESTS
    answered = {name: after[name]["count"] for name in ("success", "queue", "compute_infer", "cache_hit")}
    assert answered["success"] == answered["queue"] == answered["compute_infer"] + answered["cache_hit"]
