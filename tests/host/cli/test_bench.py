"""`edgert bench` measures a bundle and a live model, and leaves no file."""

from __future__ import annotations

from pathlib import Path

from edgert_deploy.cli import main
from tests.support.commands import Edgert, live


def test_bench_measures_a_live_model_and_a_bundle_and_leaves_no_file(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    code, live_one = edgert("bench", "echo", "here", "--for", "0.4s", "--clients", "2")
    (row,) = live_one["devices"][0]["results"]
    assert (code, live_one["devices"][0]["mode"], row["id"], row["clients"]) == (
        0,
        "as-served",
        "live: null of release 1",
        2,
    )
    assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
    assert row["per_s"] > 0
    assert row["memory_mb"] > 0
    code, both = edgert("bench", here / "echo-2.edgert", "here", "--for", "0.2s")
    assert (code, both["devices"][0]["mode"]) == (0, "engine")
    assert [one["id"] for one in both["devices"][0]["results"]] == ["null", "live: null of release 1"]
    assert all(
        {"p50_ms", "p95_ms", "p99_ms", "per_s", "memory_mb"} <= set(one) for one in both["devices"][0]["results"]
    )
    assert live(edgert) == (1, "steady")
    assert list((tmp_path / "dev" / "incoming").iterdir()) == []
    assert main(["bench", str(here / "echo-2.edgert"), "here", "--for", "0.2s"]) == 0
