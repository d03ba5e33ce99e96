"""A process of the supervisor stops only at a signal or when the supervisor has died."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from edgert.stop import Stop
from tests.support.devices import WAIT_S_MAX

# The threads of a library, such as NumPy's, exist before this and block no signal.
_WAITS = """
import select, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
from edgert.stop import stop_with_supervisor_or_signal
stop = stop_with_supervisor_or_signal(stop_s_max=600)
print("ready", flush=True)
select.select([stop], [], [])
print("stopped", flush=True)
"""


def start(stdin: int) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _WAITS], stdin=stdin, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", ["signal", "supervisor"])
def test_a_process_stops_by_a_signal_and_at_the_end_of_its_input(how: str) -> None:
    process = start(subprocess.PIPE)
    if how == "signal":
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read() if process.stdout else ""
    else:
        said, _ = process.communicate()  # closes the standard input, like the kernel when the supervisor dies
    assert said == "stopped\n"
    assert process.wait(WAIT_S_MAX) == 0


def test_a_process_that_hangs_is_ended() -> None:
    hangs = _WAITS.replace("select.select([stop], [], [])", "time.sleep(600)").replace("stop_s_max=600", "")
    process = subprocess.Popen([sys.executable, "-c", hangs], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.communicate(timeout=WAIT_S_MAX)[0] == b"ready\n"


def test_without_a_pipe_for_standard_input_only_a_signal_stops_the_process() -> None:
    process = start(subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.terminate()
    assert process.wait(WAIT_S_MAX) == 0


def test_a_stop_stays_set() -> None:
    stop = Stop()
    assert not stop.is_set()
    stop.set()
    assert stop.is_set()
