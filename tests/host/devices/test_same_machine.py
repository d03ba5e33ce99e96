"""Two names of one machine are found, whatever their addresses are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.same_machine import refuse_same_machine, refuse_same_state

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPKSUTyz1HwHReFVvD5obVsALAgJRNarH4TRpNePnAS"
HERE = Device("here", "local", "/srv/here", "this-machine", "/srv/here")
KITCHEN = Device("kitchen", "ssh", "pi@10.0.0.7", "raspberry-pi-4", "/home/pi/state", "/home/pi/edgert", KEY)
AGAIN = replace(KITCHEN, name="kitchen-2", address="pi@kitchen.local")


def test_two_names_with_one_host_key_count_as_one_machine() -> None:
    refuse_same_machine([KITCHEN, HERE], [KITCHEN, HERE])
    refuse_same_machine([HERE], [KITCHEN, AGAIN, HERE])
    for chosen in (KITCHEN, AGAIN):
        with pytest.raises(ConfigInvalid, match="they are one machine"):
            refuse_same_machine([chosen], [KITCHEN, AGAIN, HERE])
    stated = replace(AGAIN, same_machine=True)
    refuse_same_machine([KITCHEN, stated], [KITCHEN, stated, HERE])


@pytest.mark.parametrize(
    "other",
    [
        AGAIN,
        replace(HERE, name="here-2"),
        replace(KITCHEN, name="kitchen-2", same_machine=True),
        replace(KITCHEN, name="kitchen-2", host_key=KEY + "A"),
    ],
)
def test_two_names_with_one_state_folder_on_one_machine_are_refused(other: Device) -> None:
    with pytest.raises(ConfigInvalid, match=f"{other.name} are one device.* Remove one name"):
        refuse_same_state([HERE, KITCHEN, other])


def test_other_folders_and_machines_with_a_copied_disk_are_accepted() -> None:
    copied = replace(AGAIN, same_machine=True)
    own_folder = replace(KITCHEN, name="kitchen-3", state="/home/pi/other", same_machine=True)
    refuse_same_state([HERE, KITCHEN, copied, own_folder, replace(HERE, name="x", address="/srv/x", state="/srv/x")])
