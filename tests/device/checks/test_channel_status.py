"""The status that the follower stores for the daemon and for `edgertd status`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgert.checks.channel_status import ChannelStatus, WantedRelease, read_channel_status, write_channel_status
from edgert.config import DeviceConfig, FollowConfig
from edgert.state_dir import StateDir

CONFIG = DeviceConfig("d", "p", follow=FollowConfig("oci://r/x", "canary"))
KEPT = ChannelStatus(
    "oci://r/x", "canary", 7, steps=("release 8 of digits is live",), wanted={"digits": WantedRelease(8, "d8")}
)


def test_a_channel_status_is_read_back_unless_the_configured_channel_changed(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    write_channel_status(state, KEPT)  # lost, because the folder is missing
    assert read_channel_status(state, CONFIG) == ChannelStatus("oci://r/x", "canary")
    state.follow.mkdir()
    write_channel_status(state, KEPT)
    assert read_channel_status(state, CONFIG) == KEPT
    other = replace(CONFIG, follow=FollowConfig("oci://r/x", "stable"))
    assert read_channel_status(state, other) == ChannelStatus("oci://r/x", "stable")
    assert read_channel_status(state, replace(CONFIG, follow=FollowConfig())) == ChannelStatus()


def test_a_damaged_status_is_read_as_empty(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.follow.mkdir()
    (state.follow / "note.json").write_bytes(b'{"registry": 5}')
    assert read_channel_status(state, CONFIG) == ChannelStatus("oci://r/x", "canary")
