"""The device's messages: if no thread can be started, one message is lost, and the daemon continues."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edgert.config import read_config
from edgert.daemon.device_reporter import DeviceReporter
from edgert.state_dir import StateDir
from edgert.telemetry.spool import Spool

NO_STACK_BYTES = 2**46  # half of the address space, which no thread gets


def test_a_system_that_starts_no_more_threads_costs_only_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateDir(tmp_path / "state")
    state.make()
    state.config.write_text('device = "board"\nprofile = "this-machine"\n[mqtt]\nhost = "127.0.0.1"\n')
    reporter = DeviceReporter(state, read_config(state), "b1")
    before = threading.stack_size(NO_STACK_BYTES)
    try:
        reporter.event("crashed", "echo", {"release": 1})
    finally:
        threading.stack_size(before)
    (logged,) = capsys.readouterr().err.splitlines()
    assert "a message of the device is lost" in logged
    reporter.event("serving", "echo", {"release": 1})
    reporter.close()
    spool = Spool(state.spool)
    assert [message.topic.rpartition("/")[2] for message in spool.take(10)] == ["event"]
    spool.close()
