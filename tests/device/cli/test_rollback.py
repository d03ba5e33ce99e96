"""`edgertd rollback` without a daemon."""

from __future__ import annotations

from typing import Any

import pytest

from edgert.cli import edgertd
from edgert.errors import TransitionRefused
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import BY_COMMAND
from tests.support.devices import a_device

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


def test_a_second_rollback_is_refused_unless_forced() -> None:
    with a_device(started=False) as device:
        for release in (1, 2):
            store = device.stage(release=release)
            store.activate(60)
            store.mark_good()
        assert device.run("rollback", "echo") == {"model": "echo", "was": 2, "release": 1}
        refused = device.run("rollback", "echo", code=7)["error"]["message"]
        assert "deploy release 2 again to return to it" in refused
        assert device.run("rollback", "echo", "--force", "--reason", "off by 3")["release"] == 2
        rolled_back = store.read().rolled_back
        assert rolled_back is not None
        assert (rolled_back.release, rolled_back.reason) == (1, "off by 3")


def test_two_rollbacks_at_the_same_time_roll_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_device(started=False) as device:
        for release in (1, 2):
            store = device.stage(release=release)
            store.activate(60)
            store.mark_good()
        change = SlotStore._roll_back

        def second(self: SlotStore, *args: Any, **options: Any) -> Any:
            change(store, lambda before: BY_COMMAND, wait=True)  # the other command is just a little faster
            return change(self, *args, **options)

        monkeypatch.setattr(SlotStore, "_roll_back", second)
        with pytest.raises(TransitionRefused, match="deploy release 2 again to return to it"):
            edgertd.main(["--state", str(device.state.root), "rollback", "echo"], standalone_mode=False)
        live = store.read().live
        assert live is not None
        assert live.release == 1


def test_a_rollback_removes_a_version_that_is_only_installed_and_keeps_the_live_version() -> None:
    with a_device(started=False) as device:
        store = device.stage()
        store.activate(60)
        store.mark_good()
        device.stage(release=2)
        assert device.run("rollback", "echo") == {"model": "echo", "was": 1, "release": 1}
        assert store.read().spare is None
        assert "error" in device.run("rollback", "echo", code=7)
