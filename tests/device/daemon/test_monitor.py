"""The monitor restarts the daemon, and ends in the right cases."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert.daemon.monitor import LOG_BYTES_MAX, SILENT_CHECKS_MAX, VARIABLE, has_lost_its_monitor
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until

# Like `python -m edgert.daemon.monitor`, but each daemon counts as stable as soon as it starts.
KEEP = (
    "import sys; from edgert.daemon.monitor import Monitor; sys.exit(Monitor(sys.argv[1], stable_s=0.0).keep_running())"
)
# A monitor whose pause before the next start is longer than any test.
PAUSING = f"from edgert.daemon import monitor; monitor.PAUSE_S_MIN = monitor.PAUSE_S_MAX = 3600.0; {KEEP}"

# A monitor whose daemon runs for ever.
WAITING = """
import signal, sys
from edgert.daemon import monitor
monitor.CHECK_S = 0.01
monitor.Monitor(sys.argv[1])
while True:
    signal.pause()
"""

# A monitor that gets SIGTERM at each of the first calls in its pause.
TOLD_AT_EACH_CALL = f"""
import os, signal, sys
from edgert.daemon import monitor
left, log = list(range(30)), monitor.log
def tell(frame, event, argument):
    if event.endswith("call") and left:
        left.pop()
        os.kill(os.getpid(), signal.SIGTERM)
def and_tell(line):
    log(line)
    sys.setprofile(tell)
monitor.log = and_tell
{PAUSING}
"""

# A monitor that gets SIGTERM before it knows the daemon that it adopts.
TOLD_TOO_EARLY = """
import os, signal, sys
from edgert.daemon.monitor import Monitor
monitor = Monitor(sys.argv[1])
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(monitor.keep_running(int(sys.argv[2])))
"""


@pytest.fixture
def device() -> Iterator[Device]:
    with a_device(started=False, programs=True) as device:
        yield device


@pytest.fixture
def monitor(device: Device) -> Iterator[subprocess.Popen[bytes]]:
    yield from running(device, KEEP)


@pytest.fixture
def pausing_monitor(device: Device) -> Iterator[subprocess.Popen[bytes]]:
    """A monitor that pauses, because its daemon was killed."""
    for monitor in running(device, PAUSING):
        kill_daemon(device)
        wait_until(lambda: "next start in" in device.log(), "it has noticed")
        yield monitor


def running(device: Device, code: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", code, os.fspath(device.state.root)]
    with device.state.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(device.daemon_pid, "the daemon runs")
        yield process
    finally:
        process.kill()
        process.wait()


def pid_of(device: Device) -> int:
    pid = device.daemon_pid()
    assert pid is not None
    return pid


def kill_daemon(device: Device) -> None:
    os.kill(pid_of(device), signal.SIGKILL)


def test_a_monitor_that_is_told_to_end_also_ends_the_daemon(device: Device, monitor: subprocess.Popen[bytes]) -> None:
    monitor.terminate()
    assert monitor.wait(WAIT_S_MAX) == 0
    assert device.daemon_pid() is None


def test_a_daemon_that_hangs_is_replaced(device: Device, monitor: subprocess.Popen[bytes]) -> None:
    pid = pid_of(device)
    for _ in range(3 * SILENT_CHECKS_MAX):
        monitor.send_signal(signal.SIGALRM)  # the time of a check has come
        monitor.send_signal(signal.SIGCONT)  # the daemon reports
    assert device.daemon_pid() == pid
    os.kill(pid, signal.SIGSTOP)

    def killed() -> bool:
        monitor.send_signal(signal.SIGALRM)
        return "it hangs and is killed" in device.log()

    wait_until(killed, "the monitor kills the daemon")
    wait_until(lambda: device.daemon_pid() not in (None, pid), "a daemon runs again")


def test_a_daemon_reports_to_the_monitor_that_started_it(device: Device) -> None:
    reports: list[int] = []
    before = signal.signal(signal.SIGCONT, lambda number, _: reports.append(number))
    command = [sys.executable, "-m", "edgert.cli", "--state", os.fspath(device.state.root), "serve"]
    daemon = subprocess.Popen(command, env={**os.environ, VARIABLE: str(os.getpid())})
    try:
        wait_until(lambda: reports, "the daemon reports")
    finally:
        daemon.kill()
        daemon.wait()
        signal.signal(signal.SIGCONT, before)


def test_a_monitor_ends_if_the_daemon_of_another_monitor_runs(device: Device, monitor: subprocess.Popen[bytes]) -> None:
    """Two starts at the same time start two monitors. The second one would start a daemon after each stop."""
    slow = f"from edgert.daemon import monitor; monitor.REFUSED_S_MAX = 0.0; {KEEP}"  # a slow device
    second = subprocess.Popen([sys.executable, "-c", slow, os.fspath(device.state.root)])
    try:
        assert second.wait(WAIT_S_MAX) > 0
    finally:
        second.kill()
    assert monitor.poll() is None


def test_a_daemon_whose_monitor_was_killed_is_adopted_by_the_next_start(
    device: Device, monitor: subprocess.Popen[bytes]
) -> None:
    started = device.run("start")
    monitor.kill()
    monitor.wait()
    pid = started["pid"]
    assert has_lost_its_monitor(pid)
    assert device.run("start") == device.run("start") == started
    assert not has_lost_its_monitor(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: device.daemon_pid() not in (None, pid), "a daemon runs again")
    assert not has_lost_its_monitor(device.run("stop")["pid"])
    assert device.daemon_pid() is None


def test_an_adopted_daemon_that_ends_normally_is_not_started_again(
    device: Device, monitor: subprocess.Popen[bytes]
) -> None:
    monitor.kill()
    monitor.wait()
    pid = pid_of(device)
    adopting = subprocess.Popen(
        [sys.executable, "-m", "edgert.daemon.monitor", "--state", device.state.root, "--adopt", str(pid)]
    )
    device.run("stop")
    assert adopting.wait(WAIT_S_MAX) == 0
    assert device.daemon_pid() is None


def test_a_monitor_that_is_told_to_end_also_ends_an_adopted_daemon(
    device: Device, monitor: subprocess.Popen[bytes]
) -> None:
    monitor.kill()
    monitor.wait()
    pid = device.run("start")["pid"]
    (adopting,) = (path for path in Path("/proc").glob("[0-9]*") if is_adopting(path, pid))
    wait_until(lambda: catches(adopting, signal.SIGTERM), "the monitor has begun")
    os.kill(int(adopting.name), signal.SIGTERM)
    wait_until(lambda: device.daemon_pid() is None, "the daemon has ended")
    wait_until(lambda: not is_adopting(adopting, pid), "the monitor has ended")


def test_a_monitor_that_is_told_to_end_before_it_knows_the_daemon_also_ends_it(
    device: Device, monitor: subprocess.Popen[bytes]
) -> None:
    monitor.kill()
    monitor.wait()
    pid = pid_of(device)
    command = [sys.executable, "-c", TOLD_TOO_EARLY, os.fspath(device.state.root), str(pid)]
    assert subprocess.run(command, timeout=WAIT_S_MAX).returncode == 0
    assert device.daemon_pid() is None


def is_adopting(process: Path, daemon: int) -> bool:
    try:
        return f"--adopt\0{daemon}\0".encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def catches(process: Path, number: signal.Signals) -> bool:
    """Return whether the process has a handler for the signal."""
    (line,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_monitor_that_is_told_to_end_during_its_pause_ends(device: Device, monitor: subprocess.Popen[bytes]) -> None:
    kill_daemon(device)
    wait_until(lambda: "next start in" in device.log(), "it has noticed")
    monitor.terminate()
    assert monitor.wait(WAIT_S_MAX) == 0
    assert device.daemon_pid() is None


def test_a_monitor_that_is_told_to_end_at_any_moment_of_its_pause_ends(device: Device) -> None:
    for monitor in running(device, TOLD_AT_EACH_CALL):
        kill_daemon(device)
        assert monitor.wait(WAIT_S_MAX) == 0


def test_the_command_start_lets_the_monitor_of_a_killed_daemon_start_the_next_daemon(
    device: Device, pausing_monitor: subprocess.Popen[bytes]
) -> None:
    """A second monitor would start a second daemon, which cannot run, and restart it even after `edgertd stop`."""
    pid = device.run("start")["pid"]
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(pausing_monitor.pid)
    assert device.run("stop") == {"stopped": True, "pid": pid}
    assert pausing_monitor.wait(WAIT_S_MAX) == 0


def test_the_command_stop_ends_the_monitor_of_a_killed_daemon(
    device: Device, pausing_monitor: subprocess.Popen[bytes]
) -> None:
    assert device.run("stop") == {"stopped": False}
    assert pausing_monitor.wait(WAIT_S_MAX) == 0


def test_a_start_of_the_daemon_that_fails_is_tried_again(device: Device, monitor: subprocess.Popen[bytes]) -> None:
    configured = device.state.config.read_text()
    kill_daemon(device)
    device.state.config.write_text("no TOML")  # a fault that ends later, like a full disk
    wait_until(lambda: "edgertd ended with 4" in device.log(), "a start has failed")
    device.state.config.write_text(configured)
    wait_until(device.daemon_pid, "the daemon runs again")


def test_a_daemon_that_refuses_to_start_on_a_slow_device_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(2.2)")  # the imports take seconds
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", KEEP, str(tmp_path / "nothing")]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=WAIT_S_MAX).returncode == 7


def test_a_monitor_ends_after_the_removal_of_the_state_folder(device: Device, monitor: subprocess.Popen[bytes]) -> None:
    pid = pid_of(device)
    shutil.rmtree(device.state.root)
    os.kill(pid, signal.SIGKILL)
    assert monitor.wait(WAIT_S_MAX) == 0
    device.prepare()


def test_a_log_that_grows_while_the_daemon_runs_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "edgertd.log"
    with path.open("ab") as log:
        log.truncate(LOG_BYTES_MAX + 1)
        process = subprocess.Popen([sys.executable, "-c", WAITING, os.fspath(tmp_path)], stderr=log)
        try:
            wait_until(lambda: path.stat().st_size == 0, "the log is empty")
        finally:
            process.kill()
            process.wait()
