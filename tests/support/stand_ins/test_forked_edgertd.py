"""A fork runs `edgertd` like a separate process: the same answers, exit codes, files, limits and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import WAIT_S_MAX, a_device, nothing_may_be_written, runs, wait_until
from tests.support.stand_ins.forked_edgertd import EDGERTD, ForkedEdgertd


def run(argv: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S_MAX, **given)


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        ["no-such-command"],
        ["--state", "nowhere", "status"],
        ["--state", "nowhere", "status", "--json"],
        ["--state", "state", "keys", "list", "--json"],
    ],
)
def test_a_fork_answers_like_a_new_process(words: list[str], forked_edgertd: ForkedEdgertd, tmp_path: Path) -> None:
    (tmp_path / "state" / "keys").mkdir(parents=True)
    (tmp_path / "state" / "config.toml").write_text('device = "d"\nprofile = "this-machine"\n')
    argv = [*EDGERTD, *words]
    own, fork = run(argv, cwd=tmp_path), run(forked_edgertd.argv(argv), cwd=tmp_path)
    assert (fork.returncode, fork.stdout, fork.stderr) == (own.returncode, own.stdout, own.stderr)
    assert own.stdout + own.stderr


def test_a_fork_has_the_environment_and_the_limits_of_its_client(forked_edgertd: ForkedEdgertd) -> None:
    with a_device(started=False) as device:
        environment, bundle = {**os.environ, "EDGERT_STATE": str(device.state.root)}, device.bundle()
        status = run(forked_edgertd.argv([*EDGERTD, "status", "--json"]), env=environment)
        assert json.loads(status.stdout)["device"] == "d-test"
        install = forked_edgertd.argv([*EDGERTD, "install", str(bundle), "--json"])
        with nothing_may_be_written():
            # Pipes are not files: what the command prints arrives.
            assert json.loads(run(install, env=environment).stdout)["error"]["code"] == "device.storage_failed"
        assert run(install, env=environment).returncode == 0


def test_a_fork_ends_with_its_client(forked_edgertd: ForkedEdgertd) -> None:
    with a_device() as device:
        argv = [*EDGERTD, "--state", str(device.state.root), "top", "--json", "--interval", "0.1s"]
        client = subprocess.Popen(forked_edgertd.argv(argv), stdout=subprocess.PIPE)
        assert client.stdout is not None
        with client.stdout as printed:
            assert json.loads(printed.readline())
            client.send_signal(signal.SIGKILL)
            client.wait(WAIT_S_MAX)
            printed.read()  # to its end: no process has it open


def test_a_daemon_and_its_worker_are_forks_until_the_daemon_stops() -> None:
    with a_device() as device:
        device.put()
        pids = [int(device.daemon_pid() or 0), int(device.serving()["pid"])]
        programs = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
        assert all(b"forked_edgertd" in program for program in programs)
        device.stop()
        wait_until(lambda: not any(map(runs, pids)), "both have ended")


def test_other_commands_are_left_unchanged(forked_edgertd: ForkedEdgertd, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ([sys.executable, "-c", "pass"], ["sh", "-c", "exit 1"]):
        assert forked_edgertd.argv(argv) == argv
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")  # the modules there are not this tree's
    assert forked_edgertd.argv([*EDGERTD, "status"]) == [*EDGERTD, "status"]
