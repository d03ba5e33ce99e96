"""`edgert status` shows every device, with the error and the next step if the device fails."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.checks.status import ModelStatus, ServingStatus
from edgert.checks.trial_status import TrialPhase, TrialStatus
from edgert.cli.status import _model_line
from edgert.config import read_config
from edgert.versions.install import install
from edgert.versions.slots import Version
from edgert.versions.trial_limits import Readings
from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.doctor.device import check_device
from hil.support.sshd import SshDevice, running_sshd
from tests.support import devices
from tests.support.commands import Edgert, stop
from tests.support.servers.ports import free_port
from tests.support.statuses import device_status


def test_an_invalid_answer_of_a_device_is_an_error_of_this_device(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice
) -> None:
    program = sshd.home / "edgert/venv/bin/edgertd"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho '{}'\n")
    program.chmod(0o755)
    inventory.add(sshd.device())
    code, value = edgert("status")
    assert (code, value["devices"][0]["error"]["code"]) == (7, "device.error")
    shutil.rmtree(sshd.home / "edgert")


def test_a_damaged_model_does_not_hide_other_models(edgert: Edgert, inventory: Inventory, tmp_path: Path) -> None:
    there = devices.Device(tmp_path / "there")
    there.prepare()
    for model in ("echo", "other"):
        install(there.bundle(model=model), there.state, read_config(there.state))
    folder = there.state.models / "echo"
    (folder / "state.json").write_text("{")
    state = str(there.state.root)
    inventory.add(Device("here", "local", state, "this-machine", state))
    code, value = edgert("status")
    (row,) = value["devices"]
    assert (code, {m["model"]: m["state"] for m in row["status"]["models"]}) == (
        0,
        {"echo": "damaged", "other": "first-staged"},
    )
    (damaged,) = row["models"][0]["drift"]
    assert (damaged["kind"], f"remove {folder} and deploy the model again" in damaged["text"]) == ("damaged", True)
    assert any(found.next_step.startswith(f"remove {folder}") for found in check_device(inventory.device("here"), {}))
    code, refused = edgert("deploy", there.bundle(model="echo", release=2), "here")
    assert (code, refused["devices"][0]["error"]["code"]) == (7, "device.storage_failed")
    assert not list(there.state.incoming.glob("*")), "not a byte was sent"


@pytest.mark.usefixtures("edgertd_is_forked")
def test_a_reason_that_many_devices_share_is_one_line(
    inventory: Inventory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for n in range(7):
        there = devices.Device(tmp_path / f"there-{n}")
        there.prepare()
        state = str(there.state.root)
        inventory.add(Device(f"pi-{n}", "local", state, "this-machine", state))
    assert main(["status"]) == 0
    below = capfd.readouterr().out.splitlines()[8:]
    assert [line.partition(":")[0] for line in below[:1]] == ["pi-0, pi-1, pi-2, pi-3, pi-4 and 2 more"]
    assert below[1:] == [
        "next: the daemon does not run on pi-0, pi-1, pi-2, pi-3, pi-4 and 2 more: "
        "edgert bootstrap pi-0,pi-1,pi-2,pi-3,pi-4,pi-5,pi-6 starts it",
        "next: nothing was deployed to pi-0, pi-1, pi-2, pi-3, pi-4 and 2 more: "
        "edgert deploy BUNDLE pi-0,pi-1,pi-2,pi-3,pi-4,pi-5,pi-6",
    ]


def test_a_live_version_whose_trial_compared_few_answers_is_reported(
    edgert: Edgert, inventory: Inventory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    doubt = "only 25 answers were compared for agreement"
    serving = ServingStatus("ready", trial=TrialStatus(3, TrialPhase.HELD, 0.0, Readings(), "100 requests", doubt))
    model = ModelStatus("echo", "steady", Version(3, "d", good=True), None, serving=serving)
    (tmp_path / "answer.json").write_text(json.dumps(device_status(model).as_json()))
    with running_sshd(tmp_path / "sshd") as server:
        program = server.home / "edgert/venv/bin/edgertd"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\ncat {tmp_path}/answer.json\n")
        program.chmod(0o755)
        inventory.add(server.device())
        assert main(["status"]) == 0
    assert f"board echo: release 3 held its limits, but {doubt}" in capfd.readouterr().out.splitlines()
    assert f"its limits held, but {doubt}" in _model_line(model)


@pytest.mark.parametrize("become", ["", "sudo"])
def test_a_device_that_was_never_bootstrapped_is_not_reported_as_unreachable(
    become: str, edgert: Edgert, inventory: Inventory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """sudo prints a warning before each command if the device's own name has no address."""
    sudo = tmp_path / "bin" / "sudo"
    sudo.parent.mkdir()
    sudo.write_text('#!/bin/sh\nshift 2\necho "sudo: unable to resolve host board" >&2\nexec "$@"\n')
    sudo.chmod(0o755)
    with running_sshd(tmp_path / "sshd", path=f"{sudo.parent}:/usr/bin:/bin") as server:
        inventory.add(replace(server.device(), become=become))
        assert main(["status"]) == 7
    out = capfd.readouterr().out
    assert "not bootstrapped" in out.splitlines()[1]
    assert "board [device.not_bootstrapped]: EdgeRT is not set up on board: edgert bootstrap board" in out


def test_a_device_whose_python_is_missing_is_not_reported_as_never_bootstrapped(
    edgert: Edgert, inventory: Inventory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_sshd(tmp_path / "sshd") as server:
        program = server.home / "edgert/venvs/1/bin/edgertd"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!{program.parent}/python\n")
        program.chmod(0o755)
        (server.home / "edgert/venv").symlink_to("venvs/1")
        inventory.add(server.device())
        assert main(["status"]) == 7
        out = capfd.readouterr().out
        assert "runtime broken" in out.splitlines()[1]
        assert "board [device.runtime_broken]: EdgeRT is installed on board, but the Python of" in out


def test_errors_are_shown_once_below_the_table_with_the_next_step(
    inventory: Inventory, sshd: SshDevice, edgert: Edgert, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        "has no device yet: add one with edgert device add"
        in edgert("status", "--inventory", "none.toml")[1]["error"]["message"]
    )
    inventory.add(sshd.device("gone", port=free_port()))
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    stop(Path("dev"))
    capfd.readouterr()
    assert main(["status"]) == 6
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["DEVICE", "here", "gone", "gone", "here:", "next:"]
    assert max(map(len, lines[:3])) < 100
    assert "gone [device.unreachable]: gone (" in lines[3]
    assert "the daemon does not run on here: edgert bootstrap here" in lines[5]
    assert main(["deploy", str(here / "echo-1.edgert"), "gone"]) == 6
    out, err = capfd.readouterr()
    assert (out + err).count("cannot be reached") == 1


def test_a_device_that_was_replaced_is_not_reported_as_never_deployed_to(
    edgert: Edgert, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert edgert("bootstrap", "here")[0] == 0
    capfd.readouterr()
    assert main(["status"]) == 0
    assert "next: nothing was deployed to here: edgert deploy BUNDLE here" in capfd.readouterr().out.splitlines()
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    stop(Path("dev"))
    shutil.rmtree("dev/models")
    capfd.readouterr()
    assert main(["status"]) == 0
    out = capfd.readouterr().out
    assert "nothing was deployed" not in out
    assert "next: release 1 of echo is wanted on here, and no model is there, as on a new machine: edgert deploy" in out
