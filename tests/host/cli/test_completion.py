"""A shell completes commands, options, devices, groups, models and profiles, by click's own protocol."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from edgert_deploy.cli import edgert, main
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.rollout.rollout_store import RolloutStore
from tests.support.rollouts import ROLLOUT


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    inventory = Inventory(tmp_path / "conf" / "inventory.toml")
    kitchen = Device("kitchen", "local", "/kitchen", "this-machine", "/kitchen", site="plant-1", groups=("canary",))
    inventory.add(replace(kitchen, tags=("rack=3",)))
    inventory.add(replace(kitchen, name="garage", groups=()))
    return inventory


def completed(*words: str) -> list[str]:
    """Return the completions that a shell offers for the last word."""
    shell = ShellComplete(edgert, {}, "edgert", "_EDGERT_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_commands_and_options_are_completed() -> None:
    assert completed("ro") == ["rollout", "rollback"]
    assert completed("fleet", "") == ["watch", "ui", "record", "query", "export", "forget"]
    assert "--canary" in completed("deploy", "--ca")


@pytest.mark.parametrize("command", [["deploy", "m.edgert"], ["status"], ["bench", "m"], ["rollback", "m"], ["doctor"]])
def test_a_selector_is_completed_with_devices_groups_and_more(inventory: Inventory, command: list[str]) -> None:
    everything = ["all", "canary", "garage", "kitchen", "profile:this-machine", "site:plant-1", "tag:rack=3"]
    assert completed(*command, "") == everything
    assert completed(*command, "ki") == ["kitchen"]
    assert completed(*command, "canary,ga") == ["canary,garage"]
    assert completed(*command, "all,!k") == ["all,!kitchen"]


@pytest.mark.parametrize(
    ("words", "completions"),
    [("tag : ra", ["rack=3"]), ("tag : rack =", ["3"]), ("site :", ["plant-1"]), ("canary,ga", ["canary,garage"])],
)
def test_bash_which_splits_words_at_colons_also_completes_selectors(
    inventory: Inventory,
    words: str,
    completions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = f"edgert status {words}"
    for name, value in (("COMP_WORDS", typed), ("COMP_CWORD", str(typed.count(" ")))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_EDGERT_COMPLETE", "bash_complete")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.splitlines() == [f"plain,{value}" for value in completions]


def test_the_completion_uses_the_inventory_of_the_command_line(inventory: Inventory, tmp_path: Path) -> None:
    Inventory(tmp_path / "other.toml").add(replace(inventory.device("garage"), name="attic"))
    assert completed("status", "--inventory", "other.toml", "a") == ["all", "attic"]
    inventory.path.write_text("not TOML")
    assert completed("status", "") == []


def test_models_and_profiles_are_completed(inventory: Inventory, tmp_path: Path) -> None:
    RolloutStore(tmp_path / "conf" / "rollouts").write(replace(ROLLOUT, model="digits"))
    assert completed("rollback", "d") == ["digits"]
    assert completed("fleet", "query", "--model", "") == ["digits"]
    assert "digits" in completed("bench", "")
    assert "raspberry-pi-4" in completed("device", "add", "x", "--profile", "rasp")
    assert "raspberry-pi-4" in completed("publish", "digits.edgert", "--profile", "rasp")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_calls_the_command(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_EDGERT_COMPLETE={shell}_complete" in capfd.readouterr().out


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_without_a_completion_system_starts_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "script").write_text(capfd.readouterr().out)
    words = ["zsh", "-f", "-c", 'source "$1" && echo "$_comps[edgert]"', "zsh", str(tmp_path / "script")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, "ZDOTDIR": str(tmp_path)}
    )
    assert (done.stdout, done.stderr) == ("_edgert_completion\n", "")


def test_the_command_answers_the_shell(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_EDGERT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "edgert status kit")
    monkeypatch.setenv("COMP_CWORD", "2")
    words = [sys.executable, "-m", "edgert_deploy.cli"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("plain,kitchen\n", "")
