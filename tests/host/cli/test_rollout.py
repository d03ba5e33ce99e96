"""`edgert rollout`: a rollout that stopped is shown, resumed and aborted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgert.bundle.signing import new_key
from edgert_deploy.cli import main
from edgert_deploy.cli.shared.team import open_rollouts
from edgert_deploy.devices.inventory import Inventory
from edgert_deploy.rollout.plan import Offer
from edgert_deploy.rollout.request import read_offer
from edgert_deploy.rollout.rollout_record import RolloutState
from hil.support.sshd import SshDevice
from tests.support.bundles import make_null_bundle
from tests.support.commands import Edgert, live
from tests.support.servers.ports import free_port


def test_a_rollout_that_a_missing_device_stopped_can_be_shown_and_resumed_and_aborted(
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
    assert "no longer has gone" in edgert.stderr
    assert live(edgert) == (1, "steady")
    assert edgert("rollout", "abort", name)[1]["rollout"]["state"] == "done", "nothing is left to give up"
    assert edgert("rollout", "resume", "nobody")[0] == 4


def test_a_rollout_that_every_device_refused_is_not_done_and_its_release_is_not_wanted(
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


def test_a_rollout_that_another_process_aborts_while_it_is_resumed_is_not_resumed(
    inventory: Inventory, sshd: SshDevice, edgert: Edgert, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory.add(sshd.device("gone", port=free_port()))
    name = edgert("deploy", here / "echo-1.edgert", "gone,here", "--canary", "1")[1]["rollout"]["id"]

    def abort_and_read(path: Path) -> Offer:
        store = open_rollouts(changes=True)
        store.write(replace(store.read(name), state=RolloutState.ABORTED, by="another"))
        return read_offer(path)

    monkeypatch.setattr("edgert_deploy.cli.rollout.read_offer", abort_and_read)
    code, answer = edgert("rollout", "resume")
    assert (code, answer["error"]["message"]) == (2, f"rollout {name} was aborted: start a new one with edgert deploy")
    _, shown = edgert("rollout", "status")
    assert (shown["rollout"]["state"], shown["rollout"]["left"]) == ("aborted", ["gone"])
