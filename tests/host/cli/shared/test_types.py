"""Types of parameters: a wrong value is named with what to write instead."""

from __future__ import annotations

import click
import pytest

from edgert_deploy.cli.shared.types import DeviceCount


def test_a_share_is_no_count_of_devices() -> None:
    assert DeviceCount(min=0).convert("2", None, None) == 2
    with pytest.raises(click.BadParameter, match=r"'150%' is not a number of devices: .*--wave takes shares"):
        DeviceCount(min=0).convert("150%", None, None)
