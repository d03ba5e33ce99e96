"""`edgert rollout`: a rollout that stopped is shown, resumed and aborted."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.bundle.signing import new_key
from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import Inventory
from hil.support.sshd import SshDevice
from tests.support.bundles import make_null_bundle
from tests.support.commands import Edgert, live
from tests.support.servers.ports import free_port


def test_a_rollout_that_a_missing_device_held_up_is_shown_resumed_and_given_up(
    inventory: Inventory, sshd: SshDevice, edgert: Edgert, here: Path
) -> None:
    inventory.add(sshd.device("gone", port=free_port()))
    code, stopped = edgert("deploy", here / "echo-1.edgert", "gone,here", "--canary", "1")
    assert (code, stopped["ok"]) == (6, False)
    assert [(d["device"], d["result"]) for d in stopped["devices"]] == [("here", "live"), ("gone", "failed")]
    assert (stopped["rollout"]["state"], stopped["rollout"]["left"]) == ("stopped", ["gone"])
    name = stopped["rollout"]["id"]
    assert edgert("rollout", "status")[1]["rollout"]["id"] == name
    assert [rollout["rollout"]["id"] for rollout in edgert("rollout", "list")[1]["rollouts"]] == [name]
    edgert("device", "remove", "gone")
    code, resumed = edgert("rollout", "resume")
    assert (code, [d["result"] for d in resumed["devices"]], resumed["rollout"]["state"]) == (0, ["live"], "done")
    assert live(edgert) == (1, "steady")
    assert edgert("rollout", "abort", name)[1]["rollout"]["state"] == "done", "nothing is left to give up"
    assert edgert("rollout", "resume", "nobody")[0] == 4


def test_a_rollout_that_every_device_refused_is_not_done_and_not_wanted_and_advises_nothing(
    edgert: Edgert, here: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    foreign = make_null_bundle(tmp_path / "foreign", new_key(), release=5)
    capfd.readouterr()
    assert main(["deploy", str(foreign), "here"]) == 5
    shown = capfd.readouterr().out
    assert "bundle.signature_invalid" in shown
    assert "rollback" not in shown
    assert "resume" not in shown
    assert main(["rollout", "list"]) == 0
    rows = capfd.readouterr().out.splitlines()
    assert ["ended, 1 refused" in row for row in rows[1:]] == [True, False]
    assert edgert("status", "here", "--check")[0] == 0, "release 1 is wanted, and live"
