"""After an operation on the slots is cut short at any point, a complete version serves, and a retry succeeds."""

from __future__ import annotations

import shutil

import pytest

from hil.crash_points import FAULTS, OPERATIONS, table, try_all
from tests.support.devices import a_device


@pytest.mark.timeout(1800)
def test_crash_point_each_killed_or_failed_call_leaves_the_old_or_the_new_version() -> None:
    """The test injects SIGKILL, ENOSPC and EIO at every call that changes files; `-s` shows the list."""
    points = try_all()
    print("\n" + table(points))
    assert [point for point in points if point.problem] == []
    for operation in OPERATIONS:
        runs = [point for point in points if point.operation == operation]
        assert len(runs) >= 4 * len(FAULTS), f"the calls of {operation} were not counted"


def test_crash_point_leftovers_are_removed_when_the_daemon_starts() -> None:
    with a_device(started=False) as device:
        device.run("install", str(device.bundle()))
        model = device.state.models / "echo"
        for name in ("stage", "b"):
            shutil.copytree(model / "a", model / name)
        device.start()
        assert {path.name for path in model.iterdir() if path.is_dir()} == {"a"}
