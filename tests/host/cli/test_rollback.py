"""`edgert rollback` makes the previous version live, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert_deploy.cli import main
from tests.support.commands import Edgert, live


def test_a_second_rollback_does_not_return_to_the_release_that_was_rolled_back(
    edgert: Edgert, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for release in (1, 2):
        assert edgert("deploy", here / f"echo-{release}.edgert", "here")[0] == 0
    code, back = edgert("rollback", "echo", "here")
    assert (code, back["devices"]) == (0, [{"device": "here", "was": 2, "release": 1}])
    code, drifted = edgert("status", "here", "--check")
    (model,) = drifted["devices"][0]["models"]
    assert (code, model["live"], model["wanted"]["release"], model["drift"][0]["kind"]) == (12, 1, 2, "rolled-back")
    capfd.readouterr()
    assert main(["status", "here"]) == 0, "only --check makes it an error"
    next_step = "next: deploy a fixed release of echo to here: edgert deploy BUNDLE here; or deploy the bundle of release 1 again"
    assert next_step in capfd.readouterr().out
    code, refused = edgert("rollback", "echo", "here")
    assert (code, refused["error"]["code"]) == (7, "device.transition_refused")
    assert "release 1 is live after a rollback: deploy release 2 again" in refused["error"]["message"]
    assert live(edgert) == (1, "steady")
    assert edgert("deploy", here / "echo-1.edgert", "here")[1]["devices"][0]["result"] == "unchanged"
    assert edgert("status", "here", "--check")[0] == 0, "release 1 is the wanted one now"
    assert edgert("deploy", here / "echo-2.edgert", "here")[0] == 0
    assert live(edgert) == (2, "steady")
    assert edgert("status", "here", "--check")[0] == 0
    assert edgert("rollback", "echo", "here")[1]["devices"][0]["release"] == 1
    assert edgert("rollback", "echo", "here", "--force")[1]["devices"][0]["release"] == 2
