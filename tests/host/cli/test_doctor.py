"""`edgert doctor` prints every finding with its next step. It exits with the code of the first failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import Device, Inventory
from tests.support.commands import Edgert, own_key
from tests.support.servers.ports import free_port

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKtJ2Zk1O1N7xVq8M2oPpN3kQ0m4b1sUq3bF0hYy9a1T"


@pytest.fixture
def fleet(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """A correct host without an SSH agent and without devices."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    own_key(tmp_path)
    return inventory


def bare(name: str, folder: Path) -> Device:
    """A local device that is not bootstrapped."""
    return Device(name, "local", str(folder / name), "this-machine", str(folder / name))


def gone(name: str) -> Device:
    """An unreachable device."""
    return Device(name, "ssh", f"root@127.0.0.1:{free_port()}", "this-machine", "/s", "/h", HOST_KEY)


def found(answer: dict[str, Any], where: str, *levels: str) -> set[str]:
    """Return the checks on `where` that ended with one of `levels`."""
    return {one["check"] for one in answer["findings"] if one["where"] == where and one["level"] in levels}


def places(answer: dict[str, Any]) -> set[str]:
    return {one["where"] for one in answer["findings"]}


def test_without_devices_only_the_host_is_checked(edgert: Edgert, fleet: Inventory) -> None:
    code, answer = edgert("doctor")
    assert (code, answer["ok"], places(answer)) == (0, True, {"host"})
    assert "inventory" in found(answer, "host", "warn"), "no device yet is no failure"
    assert {frozenset(one) for one in answer["findings"]} == {frozenset(("where", "check", "level", "text", "next"))}
    assert all(bool(one["next"]) == (one["level"] != "ok") for one in answer["findings"])


def test_the_exit_code_is_that_of_the_first_failure_and_each_device_is_checked(
    edgert: Edgert, fleet: Inventory, tmp_path: Path
) -> None:
    fleet.add(gone("away"))
    fleet.add(bare("bare", tmp_path))
    code, answer = edgert("doctor")
    assert (code, answer["ok"], places(answer)) == (6, False, {"host", "away", "bare"})
    assert found(answer, "away", "fail") == {"reachable"}
    assert "installed" in found(answer, "bare", "fail")
    assert [edgert("doctor", selector)[0] for selector in ("bare", "away,bare", "all,!away")] == [7, 6, 7]
    assert not (tmp_path / "bare").exists(), "nothing is changed"


def test_each_finding_is_followed_by_its_next_step_and_the_numbers_are_at_the_end(
    fleet: Inventory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet.add(bare("a-device-with-a-long-name", tmp_path))
    capfd.readouterr()
    assert main(["doctor"]) == 7
    whole, said = capfd.readouterr()
    assert "checking 1 device" in said
    *lines, totals = whole.splitlines()
    named = [line for line in lines if not line.lstrip().startswith("next: ")]
    assert totals == f"{whole.count('  ok    ')} ok, {whole.count('  warn  ')} warn, {whole.count('  fail  ')} fail"
    assert (
        len({line.index(level) for line in named for level in ("  ok    ", "  warn  ", "  fail  ") if level in line})
        == 1
    )
    at = next(i for i, line in enumerate(lines) if "  installed  " in line)
    assert lines[at + 1].strip() == "next: edgert bootstrap a-device-with-a-long-name"
    assert main(["doctor", "--quiet"]) == 7
    quiet = capfd.readouterr().out.splitlines()
    assert quiet[-1] == totals, "all findings count"
    assert "  ok    " not in "\n".join(quiet)


def test_quiet_leaves_out_findings_that_are_ok_also_in_json(edgert: Edgert, fleet: Inventory) -> None:
    code, answer = edgert("doctor", "--quiet")
    assert (code, answer["ok"]) == (0, True)
    assert {one["level"] for one in answer["findings"]} <= {"warn"}


def test_only_the_host_is_checked_on_request_whatever_the_project_selects(
    edgert: Edgert, fleet: Inventory, tmp_path: Path
) -> None:
    fleet.add(gone("away"))
    (tmp_path / "conf" / "edgert.toml").write_text('selector = "away"\n')
    assert edgert("doctor")[0] == 6
    code, answer = edgert("doctor", "--host")
    assert (code, places(answer)) == (0, {"host"})
    code, answer = edgert("doctor", "away", "--host")
    assert (code, "exclude each other" in answer["error"]["message"]) == (2, True)


# --- invalid selectors and inventories


@pytest.mark.parametrize("selector", ["nobody", "", ",", "tag:", "!here"])
def test_a_selector_that_selects_nothing_is_an_error(
    edgert: Edgert, fleet: Inventory, tmp_path: Path, selector: str
) -> None:
    fleet.add(bare("here", tmp_path))
    code, answer = edgert("doctor", selector)
    assert (code, answer["error"]["code"]) == (4, "input.config_invalid"), answer


def test_a_selector_is_checked_although_the_inventory_has_another_fault(
    edgert: Edgert, fleet: Inventory, tmp_path: Path
) -> None:
    fleet.add(replace(bare("here", tmp_path), identity=str(tmp_path / "none")))
    assert "inventory" in found(edgert("doctor", "here")[1], "host", "fail")
    code, answer = edgert("doctor", "nobody")
    assert (code, "nobody" in answer["error"]["message"]) == (4, True)
    assert edgert("doctor", "all")[1]["ok"] is False


def test_without_devices_a_name_is_an_error_and_a_selector_of_the_project_is_not_an_error(
    edgert: Edgert, fleet: Inventory, tmp_path: Path
) -> None:
    code, answer = edgert("doctor", "kitchen")
    assert (code, "add one with edgert device add" in answer["error"]["message"]) == (4, True)
    (tmp_path / "conf" / "edgert.toml").write_text('selector = "kitchen"\n')
    code, answer = edgert("doctor")
    assert (code, answer["ok"], places(answer)) == (0, True, {"host"})


def test_a_selector_of_the_project_that_selects_nothing_is_one_of_the_findings(
    edgert: Edgert, fleet: Inventory, tmp_path: Path
) -> None:
    fleet.add(bare("here", tmp_path))
    (tmp_path / "conf" / "edgert.toml").write_text('selector = "kitchen"\n')
    code, answer = edgert("doctor")
    assert (code, found(answer, "host", "fail")) == (4, {"selector"})
    (finding,) = (one for one in answer["findings"] if one["check"] == "selector")
    assert "kitchen" in finding["text"]
    assert finding["next"] == "repair `selector` in the project's edgert.toml"
    assert found(answer, "host", "ok") >= {"python", "inventory"}


@pytest.mark.parametrize("words", [(), ("here",)])
def test_an_inventory_that_cannot_be_read_is_a_finding(
    fleet: Inventory, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    fleet.path.write_text("[devices.X]\n")
    capfd.readouterr()
    assert main(["doctor", *words]) == 4
    assert f"next: repair {fleet.path}" in capfd.readouterr().out
