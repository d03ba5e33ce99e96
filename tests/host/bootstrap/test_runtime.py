"""The script with which a device decides about its runtime, cut before and after each step.

hil/test_bootstrap.py tests the script with real runtimes and a real systemd. Here, a stand-in answers for the daemon,
so that the test can cut every step of the script.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from edgert.environment import Installed
from edgert.errors import RolledBack
from edgert_deploy.bootstrap.runtime import InstalledRuntimes, RuntimeAction, Runtimes, plan_runtime, script_text
from edgert_deploy.bootstrap.wheelhouse import Wheelhouse
from edgert_deploy.devices.facts import MachineFacts
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports.local import LocalTransport
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.machines import PI_4
from tests.support.stand_ins.runtimes import NEW, OLD, STAND_IN

STEPS = ("mv", "rm", "ln", "sync")  # commands that change the disk, or that require an earlier change to be on the disk
# Ends the script and all its children right before the step STEP_CUT. The cut after a step is the cut before the next.
SHIM = """\
#!/bin/sh
n=$(($(wc -l <"$STEP_LOG") + 1))
echo "NAME $*" >>"$STEP_LOG"
test "$n" != "$STEP_CUT" || kill -9 -$STEP_GROUP
REAL "$@"
"""


@dataclass(frozen=True)
class Place:
    """A device's HOME and STATE with two runtimes.

    The old one is in use; a `failing` new one answers wrongly.
    """

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def log(self) -> Path:
        return self.folder / "steps"

    def make(self, failing: str) -> None:
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "shims").mkdir()
        for name in STEPS:
            real = subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, text=True).stdout.strip()
            # The tests in hil/ test the disk itself. Here, some thousand flushes would take hours.
            self.program(self.folder / "shims" / name, SHIM, NAME=name, REAL=":" if name == "sync" else real)
        self.program(self.folder / "shims/sleep", "#!/bin/sh\nexec /bin/sleep 0.05\n")
        for runtime in (OLD, NEW):
            folder = self.home / "venvs" / runtime
            (folder / "bin").mkdir(parents=True)
            (folder / ".complete").touch()
            (folder / "bin/python").symlink_to("/bin/sh")
            self.program(folder / "bin/edgertd", STAND_IN, FAILING=failing)
        (self.home / "venv").symlink_to(self.home / "venvs" / OLD)
        (self.home / "runtime.sh").write_bytes(script_text())

    def program(self, path: Path, text: str, **words: str) -> None:
        for key, value in words.items():
            text = text.replace(key, value)
        path.write_text(text)
        path.chmod(0o755)

    def script(self, *words: str, cut: str = "0", boot: str = "b1") -> int:
        """Run the script in its own session, and end all processes of this session afterwards."""
        self.log.write_text("")
        start = 'STEP_GROUP=$$; export STEP_GROUP; exec sh "$@"'
        environment = {
            **os.environ, "PATH": f"{self.folder}/shims:{os.environ['PATH']}", "STEP_LOG": str(self.log), "STEP_CUT": cut,
            "EDGERT_BOOT_ID": boot,
        }  # fmt: skip
        command = ["sh", "-c", start, "sh", str(self.home / "runtime.sh"), *words]
        process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
        end = os.pidfd_open(process.pid)
        try:
            ended, _, _ = select.select([end], [], [], WAIT_S_MAX)
            os.killpg(process.pid, signal.SIGKILL)  # the leader is not reaped yet, so the session still exists
            assert ended, f"{words} took longer than {WAIT_S_MAX} s"
            return process.wait()
        finally:
            os.close(end)

    def trial(self, **options: str) -> int:
        return self.script("trial", "monitor", str(self.folder / "state"), "30", NEW, "echo", **options)

    def edgertd(self, runtime: str) -> Path:
        return self.home / "venvs" / runtime / "bin/edgertd"

    def daemons(self, runtime: str) -> list[int]:
        """Return the process ids of the running stand-ins for the daemon."""
        return running(self.edgertd(runtime), "--state", str(self.folder / "state"), "serve")

    def noted(self) -> list[int]:
        """Return the process id in the daemon's pid file."""
        path = self.folder / "state/edgertd.pid"
        return [int(word) for word in path.read_text().split()] if path.exists() else []

    def in_use(self) -> str:
        return (self.home / "venv").readlink().name

    def outcome(self) -> list[str]:
        path = self.home / "outcome"
        return path.read_text().splitlines() if path.exists() else []


def place(folder: Path, failing: str = "none") -> Place:
    made = Place(folder)
    made.make(failing)
    return made


def test_a_runtime_that_serves_is_kept_together_with_the_previous_runtime(tmp_path: Path) -> None:
    device = place(tmp_path)
    assert device.trial() == 0
    assert (device.in_use(), device.outcome()[:2]) == (NEW, ["kept", NEW])
    third = device.home / "venvs" / ("3" * 16)
    third.mkdir()
    assert device.script("collect") == 0
    assert sorted(path.name for path in (device.home / "venvs").iterdir()) == [OLD, NEW]


def test_a_runtime_that_answers_wrongly_is_rolled_back_with_the_reason(tmp_path: Path) -> None:
    device = place(tmp_path, failing=NEW)
    assert device.trial() == 0
    assert device.in_use() == OLD
    assert device.outcome() == ["rolled-back", NEW, "model echo: error: it computes something else"]
    assert not (device.home / "trial").exists()


@pytest.mark.parametrize("failing", ["none", NEW], ids=["serves", "fails"])
def test_after_a_cut_at_any_step_a_complete_runtime_is_in_use(tmp_path: Path, failing: str) -> None:
    whole = place(tmp_path / "whole", failing)
    whole.trial()
    steps = whole.log.read_text().splitlines()
    assert len(steps) > 10
    ends = set()
    for number, step in enumerate([*steps, "the end"], start=1):
        device = place(tmp_path / str(number), failing)
        assert device.trial(cut=str(number)) == (0 if step == "the end" else -signal.SIGKILL), step
        told, on_trial = device.outcome()[:1], (device.home / "trial").exists()
        again = number % 2 == 0  # a service manager starts the script again, or the power returned
        if again:
            device.trial()
        else:
            device.script("before-start", boot="b2")
        where = (number, step, told)
        assert not (device.home / "trial").exists(), where
        assert device.in_use() in (OLD, NEW), where
        if told == ["kept"]:
            assert device.in_use() == NEW, where  # the reported result stays
        elif on_trial or told == ["rolled-back"]:
            assert device.in_use() == OLD, where
        if again:
            assert device.outcome()[:2] == [{OLD: "rolled-back", NEW: "kept"}[device.in_use()], NEW], where
        ends.add(device.in_use())
    assert ends == ({OLD, NEW} if failing == "none" else {OLD})


def test_a_daemon_that_ends_repeatedly_is_started_on_the_old_runtime(tmp_path: Path) -> None:
    device = place(tmp_path)
    until = int(float(Path("/proc/uptime").read_text().split()[0])) + 600
    (device.home / "venv").unlink()
    (device.home / "venv").symlink_to(device.home / "venvs" / NEW)
    (device.home / "trial").write_text(f"old={OLD}\nnew={NEW}\nboot=b1\nuntil={until}\nstarts=0\n")
    for _ in range(3):
        device.script("before-start")
        assert device.in_use() == NEW
    device.script("settle")  # a host that only inspects the device starts nothing
    assert device.in_use() == NEW
    device.script("before-start")
    assert device.in_use() == OLD
    assert device.outcome() == ["rolled-back", NEW, "the daemon ended 3 times"]


def test_a_trial_whose_time_has_passed_is_rolled_back_and_a_restart_is_requested(tmp_path: Path) -> None:
    device = place(tmp_path)
    (device.home / "trial").write_text(f"old={OLD}\nnew={NEW}\nboot=b1\nuntil=1\nstarts=1\n")
    device.script("settle")
    assert device.outcome()[0] == "rolled-back"
    assert (device.home / "restart-due").exists()


def test_without_a_service_manager_a_killed_trial_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = place(tmp_path)
    undecided = STAND_IN.replace("exit 9", "exit 1")  # the new runtime may still become ready, so the trial continues
    device.program(device.home / "venvs" / NEW / "bin/edgertd", undecided, FAILING=NEW)
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{os.environ['PATH']}")
    monkeypatch.setenv("STEP_LOG", str(device.log))
    monkeypatch.setenv("STEP_CUT", "0")
    device.log.touch()
    listed = Device("d", "local", str(tmp_path), "this-machine", str(tmp_path / "state"), home=str(device.home))
    try:
        with ThreadPoolExecutor(1) as pool:
            runtimes = Runtimes(listed, LocalTransport(listed))
            tried = pool.submit(runtimes.try_out, NEW, ("echo",), "monitor", 300.0)
            wait_until(lambda: [] != device.daemons(NEW) == device.noted(), "the daemon of the new one runs")
            (script,) = running(device.home / "runtime.sh", "trial")
            os.kill(script, signal.SIGKILL)
            with pytest.raises(RolledBack, match="the trial was interrupted"):
                tried.result(WAIT_S_MAX)
        assert device.in_use() == OLD
        wait_until(lambda: [] != device.daemons(OLD) == device.noted(), "the daemon of the old one runs")
        assert device.daemons(NEW) == []
    finally:
        for runtime in (OLD, NEW):
            device.edgertd(runtime).unlink()  # this ends the daemon
        wait_until(lambda: not device.daemons(OLD), "it has ended")


def running(program: Path, *words: str) -> list[int]:
    """Return the processes that run `program WORDS`, without the children that they have just forked."""
    parents: dict[int, int] = {}
    ran = "\0".join(("sh", str(program), *words, "")).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has just ended
            if path.read_bytes().startswith((ran, b"/bin/" + ran)):
                stat = path.with_name("stat").read_text()
                parents[int(path.parent.name)] = int(stat.rpartition(")")[2].split()[1])
    return [pid for pid, parent in parents.items() if parent not in parents]


def test_another_process_with_the_daemons_id_is_not_stopped(tmp_path: Path) -> None:
    """After a reboot, the id in the pid file may belong to any process of the user."""
    device = place(tmp_path)
    with (
        subprocess.Popen(["sleep", "600"], executable="/bin/sleep") as plain,
        subprocess.Popen(["sh", "-c", "read line", "notes/edgert/todo", "edit"], stdin=subprocess.PIPE) as editor,
    ):
        try:
            for process in (plain, editor):
                (tmp_path / "state/edgertd.pid").write_text(f"{process.pid}\n")
                assert device.script("stop", str(tmp_path / "state")) == 0
                assert process.poll() is None
        finally:
            plain.kill()
            editor.kill()


def test_a_rollback_restores_the_previous_unit_with_its_runtime(tmp_path: Path) -> None:
    device, unit = place(tmp_path), tmp_path / "edgertd.service"
    device.program(tmp_path / "shims/systemctl", "#!/bin/sh\n")
    unit.write_text("new")
    (device.home / "unit.before").write_text("old")
    (device.home / "trial").write_text(f"old={OLD}\nnew={NEW}\nboot=b1\nuntil=1\nstarts=1\nunit={unit}\n")
    device.script("before-start", boot="b2")
    assert (unit.read_text(), device.in_use()) == ("old", OLD)
    assert not (device.home / "unit.before").exists()


def test_a_trial_is_not_rolled_back_to_an_incomplete_runtime(tmp_path: Path) -> None:
    device = place(tmp_path, failing=NEW)
    (device.home / "venvs" / OLD / ".complete").unlink()
    device.trial()
    assert (device.in_use(), device.outcome()[0]) == (NEW, "kept")


# --- the plan of the host ---------------------------------------------------------------------------

FACTS: MachineFacts = PI_4


def a_house(*names: str, engines: tuple[str, ...] = ("null",), digest: str = "d" * 64) -> Wheelhouse:
    pins = {name: f"sha-{name}" for name in names}
    return Wheelhouse((), pins, "0.1.0", engines, digest)


def a_runtime(name: str = "old", **more: Any) -> InstalledRuntimes:
    return InstalledRuntimes(Installed(name, **more))


def test_a_runtime_is_replaced_only_on_request_or_if_an_engine_is_missing() -> None:
    house = a_house("edgert-0.1.0-py3-none-any.whl", engines=("null", "tflite"))
    there = a_runtime(engines=("null", "tflite"))

    def action(there: InstalledRuntimes, *, upgrade: bool = False, exactly: bool = False) -> RuntimeAction:
        return plan_runtime(there, FACTS, house, upgrade=upgrade, exactly=exactly).action

    assert action(InstalledRuntimes()) is RuntimeAction.INSTALL
    assert action(there) is RuntimeAction.KEEP
    assert action(there, upgrade=True) is RuntimeAction.UPGRADE
    assert action(a_runtime("d" * 16), upgrade=True) is RuntimeAction.NONE
    shrunk = a_runtime(engines=("null",), lacking={"tflite": "no wheels"})
    assert action(shrunk) is RuntimeAction.KEEP  # the user knows this already
    assert action(shrunk, exactly=True) is RuntimeAction.UPGRADE
    assert action(a_runtime(engines=("null",))) is RuntimeAction.UPGRADE


def test_a_runtime_without_a_wanted_extra_is_upgraded() -> None:
    house = replace(a_house("edgert-0.1.0-py3-none-any.whl"), extras=("text",))
    there = a_runtime(engines=("null",))
    assert plan_runtime(there, FACTS, house, upgrade=False, exactly=False).action is RuntimeAction.UPGRADE
    there = a_runtime(engines=("null",), extras=("text",))
    assert plan_runtime(there, FACTS, house, upgrade=False, exactly=False).action is RuntimeAction.KEEP


def test_wheels_that_the_device_has_are_not_sent() -> None:
    names = ("edgert-0.1.0-py3-none-any.whl", "a-1-py3-none-any.whl", "b-1-py3-none-any.whl")
    house = a_house(*names)
    has = {names[0]: f"sha-{names[0]}", names[1]: f"sha-{names[1]}"}
    there = a_runtime(python=FACTS.python, engines=("null",), wheels=has)
    plan = plan_runtime(there, FACTS, house, upgrade=True, exactly=False)
    assert (plan.base, set(plan.send)) == ("old", {names[0], names[2]})
    interrupted = replace(there, sent=frozenset({f"sha-{names[2]}"}))
    again = plan_runtime(interrupted, FACTS, house, upgrade=True, exactly=False)
    assert (set(again.changed), again.send) == ({names[0], names[2]}, (names[0],))
    other_python = a_runtime(python="3.9", engines=("null",), wheels=has)
    assert plan_runtime(other_python, FACTS, house, upgrade=True, exactly=False).send == names
