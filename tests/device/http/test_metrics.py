"""The daemon's status, read by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from edgert.checks.status import DaemonStatus, MemoryStatus, ServingStatus
from edgert.http.metrics import STATES, exposition, labels_text
from tests.support.statuses import LOADED, worker_figures


def samples(status: DaemonStatus | None, **responses: int) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the values by name and labels, as Prometheus' own parser reads them."""
    text = exposition(status, {int(code[1:]): count for code, count in responses.items()}, "1.0").decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_without_a_daemon_only_the_server_is_described() -> None:
    assert samples(None, s200=3) == {
        ("edgert_up", ()): 0.0,
        ("edgert_build_info", ("1.0",)): 1.0,
        ("edgert_http_responses_total", ("200",)): 3.0,
    }


def test_a_model_has_one_state_and_a_served_model_has_its_figures() -> None:
    models = {
        "digits": ServingStatus("ready", memory_mb=12.5, loaded=LOADED, figures=worker_figures(106, {"full": 7})),
        "faces": ServingStatus("quarantined", crashes=3),
    }
    found = samples(DaemonStatus(1, "b", MemoryStatus(0, 0), models))
    for model, wanted in (("digits", "ready"), ("faces", "quarantined")):
        assert [state for state in STATES if found["edgert_model_state", (model, state)]] == [wanted]
    assert found["edgert_worker_memory_bytes", ("digits",)] == 12.5e6
    assert found["edgert_worker_crashes", ("faces",)] == 3
    outcomes = {name: found["edgert_requests_total", ("digits", name)] for name in ("ok", "error", "shed", "gone")}
    assert outcomes == {"ok": 100, "error": 1, "shed": 2, "gone": 0}
    assert found["edgert_request_duration_seconds_bucket", ("digits", "+Inf")] == 100
    assert found["edgert_request_duration_seconds_sum", ("digits",)] == 0.15
    assert not any(
        name in ("edgert_requests_total", "edgert_model_info") and "faces" in labels for name, labels in found
    )


def test_label_values_are_escaped_and_without_labels_the_text_is_empty() -> None:
    assert labels_text({"a": 'x"y\\z\n', "b": ""}) == '{a="x\\"y\\\\z\\n",b=""}'
    assert labels_text({}) == ""
