"""A deployment to many devices: a live table on a terminal, else a few lines, and a summary by cause."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from edgert.bundle.signing import new_key
from edgert.errors import ErrorText
from edgert_deploy.cli import main
from edgert_deploy.cli.deploy.progress import RolloutProgress
from edgert_deploy.common.parallel import UserStop
from edgert_deploy.devices.inventory import Inventory
from edgert_deploy.rollout.deployment import Outcome, Result
from tests.support.bundles import make_null_bundle
from tests.support.commands import Edgert
from tests.support.paths import ROOT
from tests.support.servers.ports import free_port
from tests.support.terminals import Terminal

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKtJ2Zk1O1N7xVq8M2oPpN3kQ0m4b1sUq3bF0hYy9a1T"
TABLE = """\
from edgert_deploy.cli.shared.output import say
from edgert_deploy.cli import main
from edgert_deploy.cli.deploy.progress import RolloutProgress
from edgert_deploy.common.parallel import UserStop
from edgert_deploy.rollout.deployment import Outcome, Result
with RolloutProgress("echo release 2", 40, UserStop()) as progress:
    for n in range(39):
        progress(f"unit-{n}", "send")
    progress.sent("unit-0", 1_500_000, 4_000_000)
    progress.sent("unit-3", 900, 4_000)
    progress("unit-1", "watch")
    progress("unit-1", "p99 \\x1b]52;c;AAAA\\x07 3 ms")
    progress.done(Outcome("unit-2", Result.LIVE))
    progress("", "wave 1 of 2")
    say("", "note: the team's store does not answer")
    input()
print("the result")
"""
ABOVE = ["the user's own line", "wave 1 of 2", "note: the team's store does not answer"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "deploy")])}


def a_fleet(inventory: Inventory, count: int) -> None:
    """Add devices at a port where nothing listens."""
    lines = []
    port = free_port()
    for n in range(count):
        lines += [f"[devices.unit-{n}]", 'transport = "ssh"', f'address = "root@127.0.0.1:{port}"']
        lines += ['profile = "this-machine"', f'state = "/s{n}"', 'home = "/h"', f'host_key = "{HOST_KEY}"']
    inventory.path.parent.mkdir(parents=True, exist_ok=True)
    inventory.path.write_text("\n".join(lines) + "\n")
    assert len(inventory.devices()) == count


def test_a_terminal_shows_the_device_and_step_and_bytes_and_time_of_each_deployment_in_progress(tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", TABLE], tmp_path, environment())
    lines = terminal.read_until(
        lambda lines: (
            any("1 of 40 devices" in line and "38 in" in line for line in lines) and "more in progress" in lines[-1]
        )
    )
    assert lines[:3] == ABOVE
    assert lines[3].startswith("echo release 2: 1 of 40 devices, 38 in progress, ")
    assert lines[4].split() == ["DEVICE", "STEP", "BYTES", "TIME"]
    assert lines[5].split()[:7] == ["unit-0", "send", "1.5", "MB", "of", "4.0", "MB"]
    assert "900 bytes of 4.0 KB" in next(line for line in lines if line.startswith("unit-3 "))
    assert lines[6].split()[:2] == ["unit-1", "watch"]
    assert "p99" in lines[6]
    assert "and 16 more in progress" in lines[-1], "the rest does not fit"
    terminal.type("\n")
    code, lines = terminal.end()
    assert code == 0
    assert [line for line in lines if line] == [*ABOVE, "the result"]


def test_the_real_command_leaves_the_screen_unchanged_and_groups_failures_by_cause(
    inventory: Inventory, tmp_path: Path
) -> None:
    a_fleet(inventory, 60)
    bundle = make_null_bundle(tmp_path / "b", new_key())
    terminal = Terminal(
        [sys.executable, "-m", "edgert_deploy.cli", "deploy", str(bundle), "all"], tmp_path, environment()
    )
    code, lines = terminal.end()
    assert code == 6, lines
    assert lines[0] == "the user's own line"
    assert lines[1].split() == ["RESULT", "DEVICES"]
    assert lines[2].split() == ["failed", "60"]
    assert lines[3].startswith("60 devices [device.unreachable]: unit-0 (root@127.0.0.1:")
    text = "".join(lines)
    assert "unit-0, unit-1, unit-2, unit-3, unit-4 and 55 more" in text
    assert "echo release 1: 0 of 60 devices" in text
    assert "edgert rollback" not in text, "nothing took the release"


def test_the_table_reports_a_ctrl_c(tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", TABLE], tmp_path, environment())
    terminal.read_until(lambda lines: any("38 in progress" in line for line in lines))
    terminal.process.send_signal(signal.SIGINT)
    lines = terminal.read_until(lambda lines: any("stopping" in line for line in lines))
    assert lines[0] == "the user's own line"
    terminal.type("\n")
    _, lines = terminal.end()
    assert (lines[:3], lines[3][:25], lines[-1]) == (ABOVE, "stopping: unfinished devi", "the result")


@pytest.mark.parametrize("terminal", ["none", "dumb"])
def test_without_a_table_each_tenth_of_the_fleet_is_a_line_and_verbose_prints_every_step(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: str
) -> None:
    if terminal == "dumb":  # it cannot redraw a table
        monkeypatch.setenv("TERM", terminal)
        monkeypatch.setenv("FORCE_COLOR", "1")  # then rich takes any stream for a terminal

    def said(verbose: bool) -> list[str]:
        with RolloutProgress("echo release 2", 1000, UserStop(), verbose=verbose) as progress:
            for n in range(1000):
                progress(f"unit-{n}", "send")
                progress.done(Outcome(f"unit-{n}", Result.LIVE))
        return capfd.readouterr().err.splitlines()

    assert said(False) == [f"echo release 2: {n} of 1000 devices" for n in range(100, 1001, 100)]
    assert len(said(True)) == 1000
    with RolloutProgress("echo release 2", 1, UserStop()) as progress:
        progress("unit", "send")
    assert capfd.readouterr().err == "[unit] send\n"


def test_a_device_whose_deployment_the_user_stopped_does_not_count_as_failed(capfd: pytest.CaptureFixture[str]) -> None:
    with RolloutProgress("echo release 2", 4, UserStop()) as progress:
        progress.done(Outcome("unit-0", Result.FAILED, error=ErrorText("device.unreachable", "off")))
        for n in range(1, 4):
            progress.done(Outcome(f"unit-{n}", Result.STOPPED, error=ErrorText("deploy.interrupted", "interrupted")))
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "echo release 2: 4 of 4 devices, 1 failed, 3 stopped"


def test_a_summary_names_each_cause_once_and_with_verbose_every_device(
    edgert: Edgert, inventory: Inventory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a_fleet(inventory, 41)
    bundle = make_null_bundle(tmp_path / "b", new_key())
    assert edgert("deploy", bundle, "all")[0] == 6
    answer = edgert("rollout", "status")[1]
    assert len(answer["devices"]) == 41, "JSON has every device"
    capfd.readouterr()
    assert main(["deploy", str(bundle), "all", "--verbose"]) == 6
    assert sum(line.startswith("unit-") and " failed " in line for line in capfd.readouterr().out.splitlines()) == 41
